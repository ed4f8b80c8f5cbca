"""uvicorn's HTTP protocol, with limits on what a peer can make it hold, and a way past ASGI for MCP.

uvicorn limits bodies, but neither an endless head nor pipelined requests, and has no timeout for a request.
For a request of MCP, ASGI's scope, events and tasks cost more than its answer: ``begin`` decides by the head
and the body whether it answers one. ASGI serves every other request, and all that would be rejected. A
connection's first request is never answered here: until then it has no holder. Must not interpret or reject a
request.
"""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, NamedTuple, Protocol

import httptools
from uvicorn._types import ASGI3Application
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from relay.http.connections import AcceptedConnection, connection_in
from relay.http.turns import LARGE_BYTES, turns_in
from schemas.addresses import MCP_PATHS
from schemas.error_roots import PeerError

MAX_HEAD_BYTES = 64 * 1024
MAX_PIPELINED = 8
"""How many requests may be queued on a connection while another is served."""
HELD_IDLE_S = 75.0
"""How long a connection that an agent holds may be idle: longer than clients keep theirs, 5 s to a minute.

A request that is sent while the server closes the connection is lost.
Before authentication it is uvicorn's 5 s.
"""

MAX_DIRECT_BYTES = 4096
"""A larger body is passed on to ASGI as it is received."""

_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
"""What uvicorn writes before a response whose client waits for it."""
_PATHS = frozenset(path.encode("ascii") for path in MCP_PATHS)
_FAILED = 500


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


class WholeRequest(NamedTuple):
    """A POST to a path of MCP, complete.

    Attributes:
        headers: as received, with lower-case names; they contain the bearer token and must not be kept.
        address: the network address that it was sent from.
        connection: counts towards an agent, which need not be the one that has sent this request.
    """

    headers: Sequence[tuple[bytes, bytes]]
    address: str
    connection: AcceptedConnection
    path: bytes
    query: bytes
    body: bytes


class HttpAnswer(NamedTuple):
    """An answer: its status, and a body of JSON."""

    status: int
    body: bytes


PendingAnswer = Coroutine[Any, Any, HttpAnswer]
Begin = Callable[[WholeRequest], PendingAnswer | None]
"""Returns what answers a request, or None if ASGI has to serve it. Its only effect is that the connection
counts towards the agent of the request."""


class _NothingWaits:
    """In place of an event: all of the request is here, and a new event would take most of a kibibyte."""

    def set(self) -> None:
        """Wake nothing."""


class DirectCycle:
    """A request that is answered here, with what uvicorn reads of the request that it serves.

    Attributes:
        task: answers it; None once it is answered.
    """

    __slots__ = ("disconnected", "keep_alive", "response_complete", "task")

    message_event = _NothingWaits()

    def __init__(self, *, keep_alive: bool) -> None:
        self.keep_alive = keep_alive
        self.response_complete = False
        self.disconnected = False
        self.task: asyncio.Task[None] | None = None


class BoundedHttp(HttpToolsProtocol):
    """HTTP that aborts a connection with an endless head, a slow request or too many queued ones.

    It answers what ``begin`` begins, and passes the rest to the ASGI application.
    """

    def __init__(self, *arguments: Any, begin: Begin | None = None, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._begin = begin
        self._turn_end = turns_in(self.app_state).turn_end
        self._held = b""
        """The answer that is sent at the end of the turn."""
        self._body: bytearray | None = None
        """What was received of a body while it is not known whether it is answered here; None otherwise."""
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
        served = self._served
        if served is not None and not served.response_complete:
            served.disconnected = True
            served.message_event.set()
        super().connection_lost(exc)
        if isinstance(served, DirectCycle) and served.task is not None:
            # One that has not begun never comes to where ``_answer`` discards it.
            served.task.add_done_callback(self.tasks.discard)
            served.task.cancel()

    def data_received(self, data: bytes) -> None:
        """Parse ``data``, and abort at a head over the limit."""
        self.send_held()
        super().data_received(data)
        if self._in_head:
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES:
                self.transport.abort()
        self._update_timer()

    def eof_received(self) -> None:
        """Send what is held: the transport closes now."""
        self.send_held()
        super().eof_received()

    def shutdown(self) -> None:
        """Close the connection once the request that is received or served is answered."""
        self.send_held()
        if not self.transport.is_closing():
            self._pass_on()
        super().shutdown()

    def send_held(self) -> None:
        """Send what is held: before anything else is written, which it must not follow."""
        held, self._held = self._held, b""
        if held and not self.transport.is_closing():
            self.transport.write(held)

    def on_message_begin(self) -> None:
        """Begin a head."""
        self._in_head, self._head_bytes = True, 0
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """End the head; the body decides who answers, if the head leaves it open."""
        self._in_head, self._in_body = False, True
        if self._may_be_direct():
            self._body = bytearray()
        else:
            self._serve_by_asgi()

    def on_body(self, body: bytes) -> None:
        """Add to the body; pass it on if it is too large to be answered here."""
        if self._body is None:
            super().on_body(body)
            return
        self._body += body
        if len(self._body) > MAX_DIRECT_BYTES:
            self._pass_on()

    def on_message_complete(self) -> None:
        """End the request, and answer it or pass it on."""
        self._in_body = False
        if self._body is not None and (work := self._begin_work(bytes(self._body))) is not None:
            self._body = None
            self._start(work)
            return
        self._pass_on()
        super().on_message_complete()

    def _may_be_direct(self) -> bool:
        """Return whether the request may be answered here, by its head and by what else is served."""
        return (
            self._begin is not None
            and self.url.partition(b"?")[0] in _PATHS
            and self._connection.holder is not None
            and (self._served is None or self._served.response_complete)
            and self.parser.get_method() == b"POST"
            and not self.expect_100_continue
            and not self.parser.should_upgrade()
            and not any(name == b"content-length" and _is_large(value) for name, value in self.headers)
        )

    def _pass_on(self) -> None:
        """Let ASGI serve the request of which the body is received here, if there is one."""
        body, self._body = self._body, None
        if body is not None:
            self._serve_by_asgi()
            if body:
                super().on_body(bytes(body))

    def _serve_by_asgi(self) -> None:
        """Pass the head on; abort the connection if too many requests are queued."""
        if len(self.pipeline) >= MAX_PIPELINED:
            self.transport.abort()
            raise PipelineError
        if not self.url.startswith(b"/"):
            self._take_host_from_target()
        super().on_headers_complete()
        if isinstance(self._served, DirectCycle) and not self._served.response_complete:
            # uvicorn stops reading while a request is queued: a disconnect would not be noticed.
            self.flow.resume_reading()

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

    def _begin_work(self, body: bytes) -> PendingAnswer | None:
        path, _, query = self.url.partition(b"?")
        if self._begin is None or self.client is None or b"#" in query:
            return None
        return self._begin(WholeRequest(self.headers, self.client[0], self._connection, path, query, body))

    def _start(self, work: PendingAnswer) -> None:
        # This list lives until the next request, and must hold no token.
        self.headers.clear()
        keep_alive = self.parser.get_http_version() != "1.0" and self.parser.should_keep_alive()
        cycle = DirectCycle(keep_alive=keep_alive)
        self.cycle = self._served = cycle  # type: ignore[assignment]  # has what uvicorn uses of one
        cycle.task = task = self.loop.create_task(self._answer(cycle, work))
        self.tasks.add(task)

    async def _answer(self, cycle: DirectCycle, work: PendingAnswer) -> None:
        try:
            answer = await work
        except BaseException:
            # As uvicorn does: also when the server ends the task, the client gets an answer.
            if cycle.disconnected:
                raise
            self.logger.exception("a request was not answered")
            cycle.keep_alive, answer = False, HttpAnswer(_FAILED, b'{"error":"internal"}')
        finally:
            # Not by a callback of the task, which would take another turn of the event loop.
            self.tasks.discard(cycle.task)
            cycle.task = None
        if self.flow.write_paused:
            await self.flow.drain()
        if not cycle.disconnected:
            self._write(cycle, answer)

    def _write(self, cycle: DirectCycle, answer: HttpAnswer) -> None:
        parts = [STATUS_LINE[answer.status]]
        for name, value in self.server_state.default_headers:
            parts += (name, b": ", value, b"\r\n")
        parts.append(b"content-type: application/json\r\ncontent-length: %d\r\n" % len(answer.body))
        if not cycle.keep_alive:
            parts.append(b"connection: close\r\n")
        parts += (b"\r\n", answer.body)
        self._held = b"".join(parts)
        if cycle.keep_alive and not self.pipeline and len(self._held) <= LARGE_BYTES:
            self._turn_end.add(self)
        else:
            self.send_held()
        cycle.response_complete = True
        if not cycle.keep_alive:
            self.transport.close()
        self.on_response_complete()


def _is_large(length: bytes) -> bool:
    return not length.isdigit() or int(length) > MAX_DIRECT_BYTES
