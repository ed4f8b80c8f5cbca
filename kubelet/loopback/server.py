"""Serves the pages to the node itself and to nobody else: one request a connection, from a few threads.

Any program of the machine can open connections: each is held for a bounded time, there is a bounded number of
them, and those that hold theirs the longest give way. Must not be bound to anything but 127.0.0.1.
"""

import io
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socketserver import TCPServer
from typing import TYPE_CHECKING, Any

from kubelet.loopback.pages import Answer, Pages, Readiness, refusal

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

ADDRESS = "127.0.0.1"
TIMEOUT_S = 5.0
MAX_CONNECTIONS = 8
_EVICTION_TIMEOUT_S = 1.0

_MAX_LINE = 65536


class _Bounded(io.RawIOBase):
    """Reads from ``connection`` until ``end``, however many reads that takes."""

    def __init__(self, connection: socket.socket, end: float) -> None:
        self._connection = connection
        self._end = end

    def readable(self) -> bool:
        """Tell that this can be read: what a buffered reader asks."""
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


class _RequestHandler(BaseHTTPRequestHandler):
    """One request of one connection: no connection is kept, so that no idle one holds a thread."""

    # What the parser assumes until it knows better; its own default would answer garbage without a status.
    default_request_version = "HTTP/1.0"

    def __init__(self, *connection: Any, pages: Pages, timeout_s: float) -> None:
        self._pages = pages
        self._timeout_s = timeout_s
        super().__init__(*connection)

    def setup(self) -> None:
        """Bound the whole request: to bound each read would let a byte now and then hold the connection."""
        super().setup()
        self.rfile.close()
        self._bounded = _Bounded(self.connection, time.monotonic() + self._timeout_s)
        self.rfile = io.BufferedReader(self._bounded)

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
        self._bounded.limit_wait()
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
        self._open: dict[socket.socket, None] = {}
        self._lock = threading.Lock()
        super().__init__((ADDRESS, port), partial(_RequestHandler, pages=pages, timeout_s=timeout_s))

    def server_bind(self) -> None:
        """Bind without the look-up of the host's name in DNS that HTTPServer makes of it."""
        TCPServer.server_bind(self)
        self.server_name, self.server_port = ADDRESS, self.server_address[1]

    def process_request(self, request: Any, client_address: Any) -> None:
        """Start a thread for a connection. Where there are too many, the oldest gives way: the slowest."""
        if not self._free.acquire(blocking=False):
            self._evict_oldest()
            if not self._free.acquire(timeout=_EVICTION_TIMEOUT_S):
                self.shutdown_request(request)
                return
        with self._lock:
            self._open[request] = None
        try:
            super().process_request(request, client_address)
        except RuntimeError:
            # No thread is left on this system. What the operator asks then is worth more than another's wait.
            self.process_request_thread(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Serve one connection, in its thread."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            with self._lock:
                self._open.pop(request, None)
            self._free.release()

    def _evict_oldest(self) -> None:
        # To the end of the table: while its thread has not let it go, the next one to give way is another.
        with self._lock, suppress(OSError, StopIteration):
            oldest = next(iter(self._open))
            self._open[oldest] = self._open.pop(oldest)
            oldest.shutdown(socket.SHUT_RDWR)

    def handle_error(self, *_request: Any) -> None:
        """Report bugs, which are ours, as those of any thread, but not clients that hang up or dawdle."""
        kind, error, trace = sys.exc_info()
        if kind is not None and not isinstance(error, OSError):
            threading.excepthook(threading.ExceptHookArgs((kind, error, trace, threading.current_thread())))


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
