"""Serves the pages on the loopback address alone: one request per connection, from a few threads.

Any program of the machine can open connections: their number and the time of each are bounded, and at the
limit the oldest is closed. HTTP/1 is read and written here: the standard library's server and parser would
keep a mebibyte of every node. Must not be bound to anything but 127.0.0.1, nor decide what is answered.
"""

import io
import os
import re
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from email.utils import formatdate
from functools import partial
from http import HTTPStatus
from io import BufferedIOBase
from socketserver import StreamRequestHandler, TCPServer, ThreadingMixIn
from typing import TYPE_CHECKING, Any

from kubelet.loopback.pages import LoopbackResponse, Pages, Readiness, refusal
from schemas.error_roots import PeerError

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer


_MAX_LINE = 65536
_MAX_FIELDS = 100
_REQUEST_LINE = re.compile(rb"([!-~]+) ([!-~]+) HTTP/([0-9]{1,10})\.[0-9]{1,10}\r?\n")
_FIELD = re.compile(rb"([!#-'*+.^_`|~0-9A-Za-z-]+):([^\r\n\0]*)\r?\n")
ADDRESS = "127.0.0.1"
TIMEOUT_S = 5.0
MAX_CONNECTIONS = 8
_EVICTION_TIMEOUT_S = 1.0


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
        """Return True: a buffered reader checks it."""
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


class _RequestHandler(StreamRequestHandler):
    """One request of one connection: no connection is kept, so that no idle one holds a thread."""

    def __init__(self, *connection: Any, pages: Pages, timeout_s: float) -> None:
        self._pages = pages
        self._timeout_s = timeout_s
        super().__init__(*connection)

    def setup(self) -> None:
        """Bound the whole request: to bound each read would let a byte now and then hold the connection."""
        super().setup()
        self.rfile.close()
        self._bounded = _BoundedReader(self.connection, time.monotonic() + self._timeout_s)
        self.rfile = io.BufferedReader(self._bounded)

    def handle(self) -> None:
        try:
            request = read_request(self.rfile)
        except BadRequestError as error:
            self._send(refusal(error.status), with_body=True)
            return
        if request is not None:
            self._send(self._response(request), with_body=request.method != "HEAD")

    def _response(self, request: LoopbackRequest) -> LoopbackResponse:
        try:
            return self._pages.respond(request.method, request.target, request.headers)
        except Exception:  # noqa: BLE001 - a bug in the state's callables must not cost the operator a response
            self.server.handle_error(self.request, self.client_address)
            return refusal(HTTPStatus.INTERNAL_SERVER_ERROR)

    def _send(self, response: LoopbackResponse, *, with_body: bool) -> None:
        self._bounded.limit_wait()
        self.wfile.write(encode_response(response, with_body=with_body))


class _HttpServer(ThreadingMixIn, TCPServer):
    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, port: int, pages: Pages, timeout_s: float) -> None:
        self._free = threading.BoundedSemaphore(MAX_CONNECTIONS)
        self._open: dict[socket.socket, None] = {}
        self._lock = threading.Lock()
        super().__init__((ADDRESS, port), partial(_RequestHandler, pages=pages, timeout_s=timeout_s))

    def process_request(self, request: Any, client_address: Any) -> None:
        """Start a thread for a connection. At the limit the oldest, which is the slowest, is closed."""
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
            # The system has no thread left: answered here, others wait, but the operator gets a response.
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
        # To the end of the table: until its thread has ended, the next one to be closed is another.
        with self._lock, suppress(OSError, StopIteration):
            oldest = next(iter(self._open))
            self._open[oldest] = self._open.pop(oldest)
            oldest.shutdown(socket.SHUT_RDWR)

    def handle_error(self, *_request: Any) -> None:
        """Report bugs as those of any thread, but not clients that close early or are slow."""
        kind, error, trace = sys.exc_info()
        if kind is not None and not isinstance(error, OSError):
            threading.excepthook(threading.ExceptHookArgs((kind, error, trace, threading.current_thread())))


class LoopbackServer:
    """Serves the pages on 127.0.0.1, once, from threads of its own. ``port`` 0 is any that is free.

    ``manifest``, ``readiness`` and ``metrics`` are those of ``Pages``; ``on_end`` is called on its thread
    when that ends by itself, which only a fault can cause.
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
        self._wanted_port = port
        self._timeout_s = timeout_s
        self._server: _HttpServer | None = None
        self._thread: threading.Thread | None = None
        self._closing = threading.Event()

    @property
    def port(self) -> int:
        """The port that is served; known after ``start``."""
        return self._wanted_port if self._server is None else self._server.server_address[1]

    def start(self) -> None:
        """Bind and serve.

        Raises:
            OSError: the port is taken; the text names it.
        """
        try:
            self._server = _HttpServer(self._wanted_port, self._pages, self._timeout_s)
        except OSError as error:
            where = f"{ADDRESS}:{self._wanted_port}"
            raise OSError(error.errno, f"cannot listen on {where}: {os.strerror(error.errno or 0)}") from None
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
        try:
            while not self._closing.is_set():
                server.handle_request()
        finally:
            if not self._closing.is_set():
                self._on_end()
