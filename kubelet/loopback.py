"""The pages that a node serves to its operator, over HTTP on the loopback address alone.

Any program of the machine, and web pages in its browser, can open connections: so nothing here changes
anything, nothing secret is shown, a request made under a foreign name (DNS rebinding) or by a foreign page is
refused, and no text of a request is ever returned or logged. One request per connection, from a few threads:
their number and the time of each are bounded, and at the limit the oldest is closed. HTTP/1 is read and
written here: the standard library's server and parser would keep a mebibyte of every node.
"""

import errno
import io
import json
import os
import re
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from email.utils import formatdate
from http import HTTPStatus
from io import BufferedIOBase
from typing import TYPE_CHECKING, Any

from schemas.error_roots import PeerError
from schemas.health import Health

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

MANIFEST_PATH = "/.well-known/mcp.json"
HEALTH_PATH = "/healthz"
READINESS_PATH = "/readyz"
METRICS_PATH = "/metrics"

# Any port: an operator may come through a tunnel that has another.
_HOST = r"(?:127\.0\.0\.1|localhost|\[::1\])(?::[0-9]{1,5})?"
_OUR_HOST = re.compile(_HOST, re.IGNORECASE)
_OUR_ORIGIN = re.compile(f"https?://{_HOST}", re.IGNORECASE)

_Fields = dict[str, list[str]]


@dataclass(frozen=True, slots=True)
class Readiness:
    """Whether calls can reach this node, and the health of each subsystem."""

    ready: bool
    subsystems: Mapping[str, Health]


@dataclass(frozen=True, slots=True)
class LoopbackResponse:
    """One response. ``body`` is what GET sends, and what HEAD only measures."""

    status: HTTPStatus
    body: bytes
    headers: Mapping[str, str]


class Pages:
    """The pages, made for each request from the state that callables return.

    ``manifest`` returns the wire bytes last published and their ETag, or None before the first; ``metrics``
    a text in Prometheus' format. All are called from the server's threads.
    """

    def __init__(
        self,
        manifest: Callable[[], tuple[bytes, str] | None],
        readiness: Callable[[], Readiness],
        metrics: Callable[[], str] = str,
    ) -> None:
        self._manifest = manifest
        self._readiness = readiness
        self._metrics = metrics
        self._pages: Mapping[str, Callable[[_Fields], LoopbackResponse]] = {
            MANIFEST_PATH: self._manifest_page,
            HEALTH_PATH: self._healthz,
            READINESS_PATH: self._readyz,
            METRICS_PATH: self._metrics_page,
        }

    def respond(self, method: str, target: str, headers: Iterable[tuple[str, str]]) -> LoopbackResponse:
        """Return the response to a request; ``headers`` are its fields as received."""
        fields: _Fields = {}
        for name, value in headers:
            fields.setdefault(name.lower(), []).append(value.strip())
        hosts = fields.get("host", [])
        if len(hosts) != 1 or not _OUR_HOST.fullmatch(hosts[0]):
            return refusal(HTTPStatus.MISDIRECTED_REQUEST)
        if not all(_OUR_ORIGIN.fullmatch(origin) for origin in fields.get("origin", [])):
            return refusal(HTTPStatus.FORBIDDEN)
        page = self._pages.get(target.partition("?")[0])
        if page is None:
            return refusal(HTTPStatus.NOT_FOUND)
        if method not in ("GET", "HEAD"):
            return refusal(HTTPStatus.METHOD_NOT_ALLOWED, {"Allow": "GET, HEAD"})
        return page(fields)

    def _healthz(self, _fields: _Fields) -> LoopbackResponse:
        dead = [name for name, health in self._readiness().subsystems.items() if not health.live]
        if dead:
            return _json(HTTPStatus.SERVICE_UNAVAILABLE, {"status": "stalled", "stalled": dead})
        return _json(HTTPStatus.OK, {"status": "ok"})

    def _readyz(self, _fields: _Fields) -> LoopbackResponse:
        readiness = self._readiness()
        status = HTTPStatus.OK if readiness.ready else HTTPStatus.SERVICE_UNAVAILABLE
        shown = {name: health.to_json() for name, health in readiness.subsystems.items()}
        return _json(status, {"ready": readiness.ready, "subsystems": shown})

    def _metrics_page(self, _fields: _Fields) -> LoopbackResponse:
        headers = {"Content-Type": "text/plain; version=0.0.4"}
        return LoopbackResponse(HTTPStatus.OK, self._metrics().encode("ascii"), headers)

    def _manifest_page(self, fields: _Fields) -> LoopbackResponse:
        published = self._manifest()
        if published is None:
            return _json(HTTPStatus.NOT_FOUND, {"error": "no manifest has been published yet"})
        wire, etag = published
        headers = {"ETag": f'"{etag}"'}
        etags = ",".join(fields.get("if-none-match", []))
        known = {tag.strip().removeprefix("W/") for tag in etags.split(",")}
        if known & {"*", headers["ETag"]}:
            return LoopbackResponse(HTTPStatus.NOT_MODIFIED, b"", headers)
        return LoopbackResponse(HTTPStatus.OK, wire, headers)


def refusal(status: HTTPStatus, headers: Mapping[str, str] | None = None) -> LoopbackResponse:
    """Return a response with ``status`` and nothing of the request."""
    return _json(status, {"error": status.phrase}, headers)


def _json(
    status: HTTPStatus, value: Mapping[str, Any], headers: Mapping[str, str] | None = None
) -> LoopbackResponse:
    return LoopbackResponse(status, json.dumps(value).encode("ascii") + b"\n", headers or {})


_MAX_LINE = 65536
_MAX_FIELDS = 100
_REQUEST_LINE = re.compile(rb"([!-~]+) ([!-~]+) HTTP/([0-9]{1,10})\.[0-9]{1,10}\r?\n")
_FIELD = re.compile(rb"([!#-'*+.^_`|~0-9A-Za-z-]+):([^\r\n\0]*)\r?\n")
ADDRESS = "127.0.0.1"
TIMEOUT_S = 5.0
MAX_CONNECTIONS = 8
_EVICTION_TIMEOUT_S = 1.0
THREAD_NAME = "loopback request"
_NOTHING_LEFT = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}
_NOTHING_LEFT_WAIT_S = 1.0


class BadRequestError(PeerError):
    """A request that cannot be parsed; ``status`` is what to answer."""

    def __init__(self, status: HTTPStatus) -> None:
        super().__init__(status)
        self.status = status


@dataclass(frozen=True, slots=True)
class LoopbackRequest:
    """One request. All of it is of foreign origin."""

    method: str
    target: str
    headers: Sequence[tuple[str, str]]


def read_request(reader: BufferedIOBase) -> LoopbackRequest | None:
    """Read the head of a request; None where the connection was closed before its first byte.

    Raises:
        BadRequestError: this is not a request, or it is too long.
    """
    line = reader.readline(_MAX_LINE + 1)
    if not line:
        return None
    if len(line) > _MAX_LINE:
        raise BadRequestError(HTTPStatus.REQUEST_URI_TOO_LONG)
    match = _REQUEST_LINE.fullmatch(line)
    if match is None:
        raise BadRequestError(HTTPStatus.BAD_REQUEST)
    if int(match[3]) > 1:
        raise BadRequestError(HTTPStatus.HTTP_VERSION_NOT_SUPPORTED)
    return LoopbackRequest(match[1].decode("ascii"), match[2].decode("ascii"), _read_fields(reader))


def _read_fields(reader: BufferedIOBase) -> list[tuple[str, str]]:
    """Read the fields of a header section (RFC 9112 section 5), and the empty line behind it."""
    fields: list[tuple[str, str]] = []
    while (line := reader.readline(_MAX_LINE + 1)) not in {b"\r\n", b"\n"}:
        if len(line) > _MAX_LINE or len(fields) == _MAX_FIELDS:
            raise BadRequestError(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)
        match = _FIELD.fullmatch(line)
        if match is None:
            raise BadRequestError(HTTPStatus.BAD_REQUEST)
        fields.append((match[1].decode("ascii"), match[2].strip(b" \t").decode("latin-1")))
    return fields


def encode_response(response: LoopbackResponse, *, with_body: bool) -> bytes:
    """Return the bytes of ``response``, which end the connection; no header names a version of anything."""
    headers = {
        "Server": "edge-kubelet",
        "Date": formatdate(usegmt=True),
        **response.headers,
        "Cache-Control": "no-store",
    }
    if response.status is not HTTPStatus.NOT_MODIFIED:
        headers |= {
            "Content-Type": headers.get("Content-Type", "application/json"),
            "X-Content-Type-Options": "nosniff",
            "Content-Length": str(len(response.body)),
        }
    lines = [f"HTTP/1.0 {response.status.value} {response.status.phrase}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    head = "\r\n".join(lines) + "\r\n\r\n"
    return head.encode("ascii") + (response.body if with_body else b"")


class _BoundedReader(io.RawIOBase):
    """Reads from ``connection`` until ``end``, however many reads that takes."""

    def __init__(self, connection: socket.socket, end: float) -> None:
        self._connection = connection
        self._end = end

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: "WriteableBuffer") -> int:
        """Fill ``buffer`` with what is there.

        Raises:
            TimeoutError: the time is over.
        """
        self.limit_wait()
        return self._connection.recv_into(buffer)

    def limit_wait(self) -> None:
        """Let the next call on the connection wait for what is left of the time."""
        left_s = self._end - time.monotonic()
        if left_s <= 0:
            raise TimeoutError
        self._connection.settimeout(left_s)


class LoopbackServer:
    """Serves the pages on 127.0.0.1, once, from threads of its own. ``port`` 0 is any that is free.

    ``manifest``, ``readiness`` and ``metrics`` are those of ``Pages``; ``on_end`` is called on its thread
    when that ends by itself, which only a fault can cause.

    Attributes:
        port: that is served, after ``start``.
    """

    def __init__(  # noqa: PLR0913 - what comes in from outside
        self,
        manifest: Callable[[], tuple[bytes, str] | None],
        readiness: Callable[[], Readiness],
        port: int = 0,
        *,
        metrics: Callable[[], str] = str,
        timeout_s: float = TIMEOUT_S,
        on_end: Callable[[], object] = lambda: None,
    ) -> None:
        self._on_end = on_end
        self._pages = Pages(manifest, readiness, metrics)
        self.port = port
        self._timeout_s = timeout_s
        self._listener: socket.socket | None = None
        self._thread: threading.Thread | None = None
        self._closing = threading.Event()
        self._free = threading.BoundedSemaphore(MAX_CONNECTIONS)
        self._open: dict[socket.socket, None] = {}
        self._lock = threading.Lock()

    def start(self) -> None:
        """Bind and serve.

        Raises:
            OSError: the port is taken; the text names it.
        """
        try:
            listener = self._listener = socket.create_server((ADDRESS, self.port))
        except OSError as error:
            where = f"{ADDRESS}:{self.port}"
            raise OSError(error.errno, f"cannot listen on {where}: {os.strerror(error.errno or 0)}") from None
        self.port = listener.getsockname()[1]
        self._thread = threading.Thread(target=self._serve, args=(listener,), name="loopback", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop serving and free the port. Does not wait for requests that are being answered."""
        if self._listener is None or self._thread is None or self._closing.is_set():
            return
        self._closing.set()
        self._listener.shutdown(socket.SHUT_RDWR)  # ends the wait of its thread
        self._thread.join()
        self._listener.close()

    def _serve(self, listener: socket.socket) -> None:
        try:
            while not self._closing.is_set():
                try:
                    self._take(listener.accept()[0])
                except OSError as error:
                    # The end of the wait; or what one connection broke, which is no reason to stop.
                    if error.errno in _NOTHING_LEFT:
                        # The connection stays pending: without a pause, accept would fail again at once.
                        self._closing.wait(_NOTHING_LEFT_WAIT_S)
        finally:
            if not self._closing.is_set():
                self._on_end()

    def _take(self, connection: socket.socket) -> None:
        """Answer on a thread. At the limit the oldest connection, which is the slowest, is closed."""
        if not self._free.acquire(blocking=False):
            # To the end of the table: until its thread has ended, the next one to be closed is another.
            with self._lock, suppress(OSError, StopIteration):
                oldest = next(iter(self._open))
                self._open[oldest] = self._open.pop(oldest)
                oldest.shutdown(socket.SHUT_RDWR)
            if not self._free.acquire(timeout=_EVICTION_TIMEOUT_S):
                connection.close()
                return
        with self._lock:
            self._open[connection] = None
        try:
            threading.Thread(target=self._answer, args=(connection,), name=THREAD_NAME, daemon=True).start()
        except RuntimeError:
            # The system has no thread left: answered here, others wait, but the operator gets a response.
            self._answer(connection)

    def _answer(self, connection: socket.socket) -> None:
        """Answer one request: no connection is kept, so that no idle one holds a thread."""
        try:
            # A client that closes early or is slow is no fault.
            with suppress(OSError), connection:
                # The whole request: to bound each read would let a byte now and then hold the connection.
                bounded = _BoundedReader(connection, time.monotonic() + self._timeout_s)
                try:
                    request = read_request(io.BufferedReader(bounded))
                except BadRequestError as error:
                    response, with_body = refusal(error.status), True
                else:
                    if request is None:
                        return
                    response, with_body = self._response(request), request.method != "HEAD"
                bounded.limit_wait()
                connection.sendall(encode_response(response, with_body=with_body))
                connection.shutdown(socket.SHUT_WR)
        finally:
            with self._lock:
                self._open.pop(connection, None)
            self._free.release()

    def _response(self, request: LoopbackRequest) -> LoopbackResponse:
        try:
            return self._pages.respond(request.method, request.target, request.headers)
        except Exception:  # noqa: BLE001 - a bug in what is shown must not cost the operator a response
            threading.excepthook(threading.ExceptHookArgs((*sys.exc_info(), threading.current_thread())))
            return refusal(HTTPStatus.INTERNAL_SERVER_ERROR)
