"""What the operator of a node can ask it over HTTP, from the node itself and from nowhere else.

``Pages`` says what is answered and knows no socket; ``LoopbackServer`` moves the bytes. Other programs of the
machine, and web pages in its browser, can reach the port: so nothing here changes anything, nothing secret is
shown, a request made under a foreign name (DNS rebinding) or by a foreign page is refused, and no text of
a request is ever answered or logged. Must not be bound to anything but 127.0.0.1.
"""

import json
import re
import socket
import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socketserver import TCPServer
from typing import Any, TypeAlias

ADDRESS = "127.0.0.1"
TIMEOUT_S = 5.0
MAX_CONNECTIONS = 32

MANIFEST_PATH = "/.well-known/mcp.json"
HEALTH_PATH = "/healthz"
READINESS_PATH = "/readyz"

# Any port: an operator may come through a tunnel that has another.
_HOST = r"(?:127\.0\.0\.1|localhost|\[::1\])(?::[0-9]{1,5})?"
_OUR_HOST = re.compile(_HOST, re.IGNORECASE)
_OUR_ORIGIN = re.compile(f"https?://{_HOST}", re.IGNORECASE)
_MAX_LINE = 65536

_Fields: TypeAlias = dict[str, list[str]]


@dataclass(frozen=True, slots=True)
class Readiness:
    """Whether calls really flow, and the state of each subsystem in a word of ours."""

    ready: bool
    subsystems: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Answer:
    """One response. ``body`` is what GET sends, and what HEAD only measures."""

    status: HTTPStatus
    body: bytes
    headers: Mapping[str, str]


class Pages:
    """The pages, made anew for every request from the state that two callables give.

    ``manifest`` returns the wire bytes last published and their ETag, or None before the first. Both are
    called from the server's threads.
    """

    def __init__(
        self, manifest: Callable[[], tuple[bytes, str] | None], readiness: Callable[[], Readiness]
    ) -> None:
        self._manifest = manifest
        self._readiness = readiness
        self._pages: Mapping[str, Callable[[_Fields], Answer]] = {
            MANIFEST_PATH: self._manifest_page,
            HEALTH_PATH: self._healthz,
            READINESS_PATH: self._readyz,
        }

    def answer(self, method: str, target: str, headers: Iterable[tuple[str, str]]) -> Answer:
        """Return the answer to a request; ``headers`` are its fields as they came."""
        fields: _Fields = {}
        for name, value in headers:
            fields.setdefault(name.lower(), []).append(value.strip())
        if (status := _stranger(fields)) is not None:
            return refusal(status)
        page = self._pages.get(target.partition("?")[0])
        if page is None:
            return refusal(HTTPStatus.NOT_FOUND)
        if method not in ("GET", "HEAD"):
            return refusal(HTTPStatus.METHOD_NOT_ALLOWED, {"Allow": "GET, HEAD"})
        return page(fields)

    def _healthz(self, _fields: _Fields) -> Answer:
        return _json(HTTPStatus.OK, {"status": "ok"})

    def _readyz(self, _fields: _Fields) -> Answer:
        readiness = self._readiness()
        status = HTTPStatus.OK if readiness.ready else HTTPStatus.SERVICE_UNAVAILABLE
        return _json(status, {"ready": readiness.ready, "subsystems": dict(readiness.subsystems)})

    def _manifest_page(self, fields: _Fields) -> Answer:
        published = self._manifest()
        if published is None:
            return _json(HTTPStatus.NOT_FOUND, {"error": "no manifest has been published yet"})
        wire, etag = published
        headers = {"ETag": f'"{etag}"'}
        asked = ",".join(fields.get("if-none-match", []))
        known = {tag.strip().removeprefix("W/") for tag in asked.split(",")}
        if known & {"*", headers["ETag"]}:
            return Answer(HTTPStatus.NOT_MODIFIED, b"", headers)
        return Answer(HTTPStatus.OK, wire, headers)


def _stranger(fields: _Fields) -> HTTPStatus | None:
    hosts = fields.get("host", [])
    if len(hosts) != 1 or not _OUR_HOST.fullmatch(hosts[0]):
        return HTTPStatus.MISDIRECTED_REQUEST
    if not all(_OUR_ORIGIN.fullmatch(origin) for origin in fields.get("origin", [])):
        return HTTPStatus.FORBIDDEN
    return None


def refusal(status: HTTPStatus, headers: Mapping[str, str] | None = None) -> Answer:
    """Return an answer that says ``status`` and nothing that came in."""
    return _json(status, {"error": status.phrase}, headers)


def _json(status: HTTPStatus, value: Mapping[str, Any], headers: Mapping[str, str] | None = None) -> Answer:
    return Answer(status, json.dumps(value).encode("ascii") + b"\n", headers or {})


class _RequestHandler(BaseHTTPRequestHandler):
    """One request of one connection: no connection is kept, so that no idle one holds a thread."""

    # What the parser assumes until it knows better; its own default would answer garbage without a status.
    default_request_version = "HTTP/1.0"

    def __init__(self, *connection: Any, pages: Pages, timeout_s: float) -> None:
        self._pages = pages
        self._timeout_s = timeout_s
        super().__init__(*connection)

    def setup(self) -> None:
        """Bound every wait for the other side."""
        self.request.settimeout(self._timeout_s)
        super().setup()

    def handle_one_request(self) -> None:
        """Answer any method, where the base class knows only those that it has a function for."""
        self.command, self.requestline, self.request_version = "", "", self.default_request_version
        self.raw_requestline = self.rfile.readline(_MAX_LINE + 1)
        if not self.raw_requestline:
            return
        if len(self.raw_requestline) > _MAX_LINE:
            self.send_error(HTTPStatus.REQUEST_URI_TOO_LONG)
            return
        if not self.parse_request():
            return
        try:
            answer = self._pages.answer(self.command, self.path, self.headers.items())
        except Exception:  # noqa: BLE001 - a bug in the state's callables must not cost the operator an answer
            self.server.handle_error(self.request, self.client_address)
            answer = refusal(HTTPStatus.INTERNAL_SERVER_ERROR)
        self._send(answer)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:  # noqa: ARG002 - the parser's texts hold the request
        """Answer what could not be parsed."""
        self._send(refusal(HTTPStatus(code)))

    def _send(self, answer: Answer) -> None:
        self.send_response(answer.status)
        for name, value in answer.headers.items():
            self.send_header(name, value)
        self.send_header("Cache-Control", "no-store")
        if answer.status is not HTTPStatus.NOT_MODIFIED:
            self.send_header("Content-Type", "application/json")
            self.send_header("X-Content-Type-Options", "nosniff")
            self.send_header("Content-Length", str(len(answer.body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(answer.body)

    def version_string(self) -> str:
        """Return the Server header, which names no version of anything."""
        return "edge-kubelet"

    def log_message(self, *_args: Any) -> None:
        """Log nothing: request lines are foreign text."""


class _HttpServer(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, port: int, pages: Pages, timeout_s: float, max_connections: int) -> None:
        self._free = threading.BoundedSemaphore(max_connections)
        super().__init__((ADDRESS, port), partial(_RequestHandler, pages=pages, timeout_s=timeout_s))

    def server_bind(self) -> None:
        """Bind without the look-up of the host's name in DNS that HTTPServer makes of it."""
        TCPServer.server_bind(self)
        self.server_name, self.server_port = ADDRESS, self.server_address[1]

    def process_request(self, request: Any, client_address: Any) -> None:
        """Start a thread for a connection, or drop it where there are too many."""
        if not self._free.acquire(blocking=False):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except BaseException:
            self._free.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Serve one connection, in its thread."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Report bugs, which are ours, but not clients that hang up or dawdle."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)


class LoopbackServer:
    """Serves the pages on 127.0.0.1, once, from threads of its own. ``port`` 0 is any that is free.

    ``manifest`` and ``readiness`` are those of ``Pages``.
    """

    def __init__(
        self,
        manifest: Callable[[], tuple[bytes, str] | None],
        readiness: Callable[[], Readiness],
        port: int = 0,
        *,
        timeout_s: float = TIMEOUT_S,
        max_connections: int = MAX_CONNECTIONS,
    ) -> None:
        self._pages = Pages(manifest, readiness)
        self._wanted_port = port
        self._timeout_s = timeout_s
        self._max_connections = max_connections
        self._server: _HttpServer | None = None
        self._thread: threading.Thread | None = None
        self._closing = threading.Event()

    @property
    def port(self) -> int:
        """The port that is served; known after ``start``."""
        return self._wanted_port if self._server is None else self._server.server_port

    def start(self) -> None:
        """Bind and serve.

        Raises:
            OSError: the port is taken.
        """
        self._server = _HttpServer(self._wanted_port, self._pages, self._timeout_s, self._max_connections)
        self._thread = threading.Thread(
            target=self._serve, args=(self._server,), name="loopback", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Stop serving and free the port. Does not wait for requests that are being answered."""
        if self._server is None or self._thread is None or self._closing.is_set():
            return
        self._closing.set()
        # Wakes the thread from its wait at once, where the standard library's loop would poll twice a second.
        self._server.socket.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._server.server_close()

    def _serve(self, server: _HttpServer) -> None:
        while not self._closing.is_set():
            server.handle_request()
