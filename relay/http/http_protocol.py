"""uvicorn's HTTP protocol with limits on what a peer can make this process hold.

uvicorn limits bodies, but neither an endless head nor pipelined requests, and has no timeout for a request.
Must not interpret requests.
"""

import asyncio
from typing import Any, Protocol

import httptools
from uvicorn._types import ASGI3Application
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from relay.http.connections import connection_in
from schemas.error_roots import PeerError

MAX_HEAD_BYTES = 64 * 1024
MAX_PIPELINED = 8
"""How many requests may be queued on a connection while another is served."""
HELD_IDLE_S = 75.0
"""How long a connection that an agent holds may be idle: longer than clients keep theirs, 5 s to a minute.

A request that is sent while the server closes the connection is lost.
Before authentication it is uvicorn's 5 s.
"""

_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
"""What uvicorn writes before a response whose client waits for it."""


class PipelineError(PeerError):
    """Too many requests are queued on one connection: raised to end the parsing of the received data."""


class Signal(Protocol):
    """What is told that its request has lost its client."""

    def set(self) -> None:
        """Wake what waits for it."""


class ServedRequest(Protocol):
    """What is read here of the request that is served."""

    response_complete: bool
    disconnected: bool

    @property
    def message_event(self) -> Signal:
        """Wakes what waits for the request's body, or for its end."""


class JoinedHead:
    """The transport of one response, which sends its head in one write with what follows at once.

    uvicorn writes them apart, and each write wakes the client. Holds back no body, so that what bounds a
    stream's buffer works as before. Must not refer to its response, which refers to it: the garbage collector
    would have to free both, at every call.
    """

    __slots__ = ("_head", "_transport")

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._head: bytes | None = None

    def write(self, data: bytes) -> None:
        """Send ``data``, after the head if that has not been sent."""
        if self._head is None and data != _CONTINUE:
            self._head = data
            # What follows may take a while: a stream begins with silence.
            asyncio.get_running_loop().call_soon(self._flush)
        elif self._head:
            data, self._head = self._head + data, b""
            self._transport.write(data)
        else:
            self._transport.write(data)

    def is_closing(self) -> bool:
        """Return whether the connection is closing."""
        return self._transport.is_closing()

    def close(self) -> None:
        """Close the connection once everything is sent."""
        self._flush()
        self._transport.close()

    def _flush(self) -> None:
        if self._head and not self._transport.is_closing():
            self._transport.write(self._head)
        self._head = b""


class BoundedHttp(HttpToolsProtocol):
    """HTTP that aborts a connection with an endless head, a slow request or too many queued ones."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._connection = connection_in(self.app_state)
        self._head_bytes = 0
        self._in_head = False
        self._in_body = False
        self._served: ServedRequest | None = None
        self._idle_since: float | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn's
        """Begin; the timer of the first request runs since the connection was accepted."""
        super().connection_made(transport)
        self._connection.begin(transport.abort)

    def connection_lost(self, exc: Exception | None) -> None:
        """End, and signal the request that is served: uvicorn signals the last one, which may be queued."""
        self._connection.end()
        if self.timeout_keep_alive_task is not None:
            self.timeout_keep_alive_task.cancel()
        if self._served is not None and not self._served.response_complete:
            self._served.disconnected = True
            self._served.message_event.set()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse ``data``, and abort at a head over the limit."""
        super().data_received(data)
        if self._in_head:
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES:
                self.transport.abort()
        self._update_timer()

    def on_message_begin(self) -> None:
        """Begin a head."""
        self._in_head, self._head_bytes = True, 0
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """End the head; abort the connection if too many requests are queued."""
        if len(self.pipeline) >= MAX_PIPELINED:
            self.transport.abort()
            raise PipelineError
        self._in_head, self._in_body = False, True
        if not self.url.startswith(b"/"):
            self._take_host_from_target()
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """End the request."""
        self._in_body = False
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """Serve the next request that is queued, or wait for one: for a time, by a timer that runs already.

        uvicorn starts a timer after each response, and cancels it at the next request.
        """
        self.server_state.total_requests += 1
        if self.transport.is_closing():
            return
        self.flow.resume_reading()
        if self.pipeline:
            self._start_asgi_task(*self.pipeline.pop())
            return
        self._idle_since = self.loop.time()
        if self.timeout_keep_alive_task is None:
            self._time_idleness(self._idle_limit_s)

    def timeout_keep_alive_handler(self) -> None:
        """Close the connection if it is idle for the whole time."""
        self.timeout_keep_alive_task = None
        if self._idle_since is None:
            return  # a request is served; its end starts the timer
        left_s = self._idle_since + self._idle_limit_s - self.loop.time()
        if left_s > 0:
            self._time_idleness(left_s)
        else:
            super().timeout_keep_alive_handler()

    @property
    def _idle_limit_s(self) -> float:
        return self.timeout_keep_alive if self._connection.holder is None else HELD_IDLE_S

    def _time_idleness(self, seconds: float) -> None:
        self.timeout_keep_alive_task = self.loop.call_later(seconds, self.timeout_keep_alive_handler)

    def _unset_keepalive_if_required(self) -> None:
        """Note that the connection is not idle: its timer goes on."""
        self._idle_since = None

    def _take_host_from_target(self) -> None:
        """Reject a request for two hosts: an absolute target names one too (RFC 9112 section 3.2.2)."""
        try:
            target = httptools.parse_url(self.url)
        except httptools.HttpParserInvalidURLError:
            return  # uvicorn answers 400
        if target.host:
            name = target.host + (b":%d" % target.port if target.port else b"")
            hosts = {value.strip(b" \t").lower() for header, value in self.headers if header == b"host"}
            if hosts != {name.lower()}:
                self.headers.append((b"host", name))  # two of them are rejected by the guard

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self._served = cycle
        cycle.transport = JoinedHead(self.transport)  # type: ignore[assignment]  # as a cycle uses it
        super()._start_asgi_task(cycle, app)

    def _update_timer(self) -> None:
        """Run the timer while a request is received or awaited, and not while one is served."""
        served = self._served is not None and not self._served.response_complete
        if self.transport.get_protocol() is not self:
            self._connection.upgrade()
        elif served and not (self._in_head or self._in_body):
            self._connection.rest()
        else:
            self._connection.expect()
