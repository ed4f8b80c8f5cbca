"""uvicorn's HTTP protocol, with limits on what a peer can make it hold, and a way past ASGI for MCP.

uvicorn limits bodies, but neither an endless head nor pipelined requests, and has no timeout for a request.
What is received is parsed request by request: each is metered first, and waits for the one before it to be
answered. For a request of MCP, ASGI's scope, events and tasks cost more than its answer: ``begin`` decides by
the head and the body whether it answers one. ASGI serves every other request, and all that would be rejected.
A connection's first request is never answered here: until then it has no holder. Must not interpret or reject
a request.
"""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import httptools
from uvicorn._types import ASGI3Application
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from relay.http.connections import AcceptedConnection
from relay.http.request_meter import BYTES_LIKE_A_REQUEST, READ_COST, Share, share_of
from relay.http.turns import LARGE_BYTES, Turns
from relay.http.websocket_protocol import BoundedWebSocket, ServeSocket
from schemas.addresses import MCP_PATHS
from schemas.error_roots import PeerError

if TYPE_CHECKING:
    from relay.http.request_meter import Lane

MAX_HEAD_BYTES = 16 * 1024
"""Of a head; and of what may come where a body is to come: a trailer, or an extension of a chunk."""
MAX_FIELDS = 100
MAX_PIPELINED = 8
"""How many requests may wait on a connection while another is served, in 64 KiB."""
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
_HEAD_END, _LINE_ENDS = b"\r\n\r\n", b"\r\n"
_FORWARDED_FOR = b"x-forwarded-for"
_FAILED = 500
UNKNOWN_ADDRESS = "unknown"


class RequestBoundError(PeerError):
    """A head is too large, or a request may not be queued: raised to end the parsing of the received data."""


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
        return self._transport.is_closing()

    def close(self) -> None:
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


class PendingAnswer(NamedTuple):
    """What answers a request once it is run.

    Attributes:
        goes_on: whether it is run to its end when its client disconnects.
    """

    work: Coroutine[Any, Any, HttpAnswer]
    goes_on: bool = False


Begin = Callable[[WholeRequest], PendingAnswer | None]
"""Returns what answers a request, or None if ASGI has to serve it. Its only effect is that the connection
counts towards the agent of the request."""


class _NothingWaits:
    """In place of an event: all of the request is here, and a new event would take most of a kibibyte."""

    def set(self) -> None: ...


class DirectCycle:
    """A request that is answered here, with what uvicorn reads of the request that it serves.

    Attributes:
        goes_on: whether its task is not cancelled when its client disconnects.
        task: answers it; None once it is answered.
    """

    __slots__ = ("disconnected", "goes_on", "keep_alive", "response_complete", "task")

    message_event = _NothingWaits()

    def __init__(self, *, keep_alive: bool, goes_on: bool) -> None:
        self.keep_alive = keep_alive
        self.goes_on = goes_on
        self.response_complete = False
        self.disconnected = False
        self.task: asyncio.Task[None] | None = None


class BoundedHttp(HttpToolsProtocol):
    """HTTP that aborts a connection with an endless head, a slow request or too many queued ones.

    It answers what ``begin`` begins, and passes the rest to the ASGI application.
    """

    def __init__(
        self,
        *,
        connection: AcceptedConnection,
        turns: Turns,
        begin: Begin,
        serve_socket: ServeSocket,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self._connection = connection
        self._turns = turns
        self._begin = begin
        self._serve_socket = serve_socket
        self._held = b""
        """The answer that is sent at the end of the turn."""
        self._body: bytearray | None = None
        """What was received of a body while it is not known whether it is answered here; None otherwise."""
        self._unparsed = bytearray()
        """What was received and waits: for its turn, or for the answer of an earlier request."""
        self._head_tail = b""
        """The last bytes of an unfinished head, or of chunks: the end may come in two pieces."""
        self._waits_in: Lane | None = None
        self._share = Share.REQUESTS
        self._body_left: int | None = None
        """How much of the body is still to come; None if its chunks say so."""
        self._head_bytes = self._received_bytes = 0
        self._has_body = False
        self._in_head = False
        self._in_body = False
        self._served: RequestResponseCycle | DirectCycle | None = None
        self._idle_since: float | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn's
        """Begin; the timer of the first request runs since the connection was accepted."""
        super().connection_made(transport)
        if self.client is not None and self.client[0] != self._connection.address:
            self.client = (self._connection.address, 0)  # a proxy has passed it on
        self._connection.begin(transport.abort)

    def connection_lost(self, exc: Exception | None) -> None:
        """End, and signal the request that is served: uvicorn signals the last one, which may be queued."""
        self._connection.end()
        self._unparsed.clear()
        if self._waits_in is not None:
            self._waits_in.leave(self._resume)
        if self.timeout_keep_alive_task is not None:
            self.timeout_keep_alive_task.cancel()
        served = self._served
        if served is not None and not served.response_complete:
            served.disconnected = True
            served.message_event.set()
        super().connection_lost(exc)
        if isinstance(served, DirectCycle) and served.task is not None and not served.goes_on:
            # One that has not begun never comes to where ``_answer`` discards it.
            served.task.add_done_callback(self.tasks.discard)
            served.task.cancel()

    def data_received(self, data: bytes) -> None:
        """Parse ``data``, or what may be parsed now."""
        self.send_held()
        self._unparsed += data
        if self._waits_in is not None:
            self.transport.pause_reading()  # uvicorn may have resumed it
        self._parse()

    def _resume(self) -> None:
        """Parse what has waited for its turn."""
        self._waits_in = None
        if not self.transport.is_closing():
            if not self.flow.read_paused:
                self.transport.resume_reading()
            self._parse(is_paid=True)

    def _parse(self, *, is_paid: bool = False) -> None:
        """Parse what was received, one request after the other, each once the meter allows it."""
        while self._unparsed and self._waits_in is None and self._is_parsed_here:
            if not (self._in_head or self._in_body):
                if self._is_serving:
                    self._check_waiting()
                    break
                if self._unparsed[0] in _LINE_ENDS:  # RFC 9112 section 2.2: empty lines before a request
                    self._unparsed = self._unparsed.lstrip(_LINE_ENDS)
                self._share = share_of(self._unparsed)
            size, requests = self._next_piece()
            if not is_paid and not self._enter(requests + max(READ_COST, size / BYTES_LIKE_A_REQUEST)):
                break
            is_paid = False
            piece = bytes(self._unparsed[:size])
            del self._unparsed[:size]
            self._feed(piece)
        self._update_timer()

    @property
    def _is_parsed_here(self) -> bool:
        return not self.transport.is_closing() and self.transport.get_protocol() is self

    def _next_piece(self) -> tuple[int, int]:
        """Return how many bytes are parsed next, and how many heads end in them: one at most."""
        data = self._unparsed
        if self._in_body and self._body_left is not None:
            return min(len(data), self._body_left), 0
        before = len(self._head_tail)
        end = (self._head_tail + data).find(_HEAD_END) if before else data.find(_HEAD_END)
        if end < 0:
            self._head_tail = bytes(self._head_tail + data[1 - len(_HEAD_END) :])[1 - len(_HEAD_END) :]
            return len(data), 0
        self._head_tail = b""
        end += len(_HEAD_END) - before
        if self._in_body:
            # Chunks end so, and may have it within: what follows them is another request, with a price.
            return end, 0
        # Where no other head ends behind it, what follows is its body, or the beginning of one head.
        return len(data) if data.find(_HEAD_END, end) < 0 else end, 1

    def _enter(self, cost: float) -> bool:
        """Charge the source of the connection; return False if it has to wait for its turn."""
        connection = self._connection
        if connection.source is None:
            return True
        is_new = self._served is None
        self._waits_in = connection.meter.enter(
            connection.source, self._share, cost, self._resume, is_new=is_new
        )
        if self._waits_in is None:
            return True
        self.transport.pause_reading()
        return False

    def _check_waiting(self) -> None:
        """Read no further if too much waits behind the request that is served; abort if it may last.

        Of a stream it must be noticed that its client disconnects, so reading goes on until then.
        """
        if len(self._unparsed) <= HIGH_WATER_LIMIT and self._unparsed.count(_HEAD_END) <= MAX_PIPELINED:
            return
        if isinstance(self._served, DirectCycle):
            self.flow.pause_reading()
        else:
            self.transport.abort()

    def _feed(self, data: bytes) -> None:
        """Parse ``data``, and abort at a head over the limit, or at what is no body where one is to come."""
        self._received_bytes, self._has_body = len(data), False
        super().data_received(data)
        if self._in_body and self._body_left is None and not self._head_tail:
            self._head_tail = data[1 - len(_HEAD_END) :]  # the end of the chunks may have begun
        if (self._in_head or self._in_body) and not self._has_body:
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES:
                self.transport.abort()

    def eof_received(self) -> None:
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
        self._in_head, self._head_bytes = True, 0
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        """Add a field of the head, as uvicorn does. One of a trailer, behind the body, decides nothing."""
        if not self._in_head:
            return
        if len(self.headers) >= MAX_FIELDS:
            self._exceed()
        name = name.lower()
        if name == b"expect" and value.lower() == b"100-continue":
            self.expect_100_continue = True
        self.headers.append((name, value))

    def on_headers_complete(self) -> None:
        """End the head; the body decides who answers, if the head leaves it open."""
        if self._head_bytes + self._received_bytes > MAX_HEAD_BYTES:
            # Of what was received with it, some may not be of the head.
            fields = sum(len(name) + len(value) for name, value in self.headers)
            if len(self.url) + fields > MAX_HEAD_BYTES:
                self._exceed()
        self._in_head, self._in_body = False, True
        if self._connection.source is None:
            self._take_client_from_proxy()
        self._body_left = None
        for name, value in self.headers:
            if name == b"content-length" and value.strip(b" \t").isdigit():
                self._body_left = int(value)
                break
        if self._may_be_direct():
            self._body = bytearray()
        else:
            self._serve_by_asgi()

    def on_body(self, body: bytes) -> None:
        """Add to the body; pass it on if it is too large to be answered here."""
        self._head_bytes, self._has_body = 0, True
        if self._body_left is not None:
            self._body_left -= len(body)
        if self._body is None:
            super().on_body(body)
            if self.pipeline and len(self.cycle.body) > HIGH_WATER_LIMIT:
                # uvicorn stops reading until it is served: a disconnect would not be noticed.
                self.transport.abort()
            return
        self._body += body
        if len(self._body) > MAX_DIRECT_BYTES:
            self._pass_on()

    def on_message_complete(self) -> None:
        self._in_body, self._head_tail = False, b""
        if self._body is not None and (pending := self._begin_work(bytes(self._body))) is not None:
            self._body = None
            self._start(pending)
            return
        self._pass_on()
        super().on_message_complete()

    @property
    def _is_serving(self) -> bool:
        return self._served is not None and not self._served.response_complete

    def _exceed(self) -> None:
        """End the connection: by a 400 of uvicorn, unless that would overtake another request's answer."""
        if self._is_serving:
            self.transport.abort()
        raise RequestBoundError

    def handle_websocket_upgrade(self) -> None:
        if self._is_serving:
            self.transport.abort()  # what accepts it would overtake the answer
            return
        address = self.client[0] if self.client else UNKNOWN_ADDRESS
        if self._connection.source is None and not self._connection.become_of(address):
            self.transport.abort()  # what a proxy forwards is one node's from now on
            return
        self.connections.discard(self)
        socket = BoundedWebSocket(
            self._serve_socket, self.transport, address, self._connection, self._turns, self.server_state
        )
        self.transport.set_protocol(socket)
        # It refers to this: the connection's memory would wait for the garbage collector, minutes later.
        self.parser = None  # type: ignore[assignment]  # as uvicorn does when a connection ends
        socket.begin(self.url, self.headers)

    def _may_be_direct(self) -> bool:
        """Return whether the request may be answered here, by its head and by what else is served."""
        return (
            self.url.partition(b"?")[0] in _PATHS
            and self._connection.holder is not None
            and not self._is_serving
            and self.parser.get_method() == b"POST"
            and not self.expect_100_continue
            and not self.parser.should_upgrade()
            and (self._body_left is None or self._body_left <= MAX_DIRECT_BYTES)
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
            self._exceed()
        if not self.url.startswith(b"/"):
            self._take_host_from_target()
        super().on_headers_complete()
        if self.pipeline:
            self.flow.resume_reading()  # which uvicorn stops here too

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
        if self._unparsed:
            self._parse()

    def timeout_keep_alive_handler(self) -> None:
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

    def _take_client_from_proxy(self) -> None:
        peer, proxies = self._connection.address, self._connection.proxies
        values = [value for name, value in self.headers if name == _FORWARDED_FOR]
        self.client = (proxies.client_of(peer, values), 0)
        self.scope["client"] = self.client

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
        if self.transport.get_protocol() is not self:
            self._connection.upgrade()
        elif self._is_serving and not (self._in_head or self._in_body):
            self._connection.rest()
        else:
            self._connection.expect()

    def _begin_work(self, body: bytes) -> PendingAnswer | None:
        path, _, query = self.url.partition(b"?")
        if self.client is None or b"#" in query:
            return None
        return self._begin(WholeRequest(self.headers, self.client[0], self._connection, path, query, body))

    def _start(self, pending: PendingAnswer) -> None:
        # This list lives until the next request, and must hold no token.
        self.headers.clear()
        keep_alive = self.parser.get_http_version() != "1.0" and self.parser.should_keep_alive()
        cycle = DirectCycle(keep_alive=keep_alive, goes_on=pending.goes_on)
        self.cycle = self._served = cycle  # type: ignore[assignment]  # has what uvicorn uses of one
        cycle.task = task = self.loop.create_task(self._answer(cycle, pending.work))
        self.tasks.add(task)

    async def _answer(self, cycle: DirectCycle, work: Coroutine[Any, Any, HttpAnswer]) -> None:
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
            self._turns.turn_end.add(self, is_whole=True)
        else:
            self.send_held()
        cycle.response_complete = True
        if not cycle.keep_alive:
            self.transport.close()
        self.on_response_complete()
