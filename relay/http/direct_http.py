"""Answers a request of MCP that was received in one piece without ASGI.

For such a request ASGI's scope, events and tasks cost more than its answer. ``begin`` decides by the head and
the body whether it answers one; ASGI serves every other request, and all that would be rejected. A
connection's first request is never answered here: until then it has no holder. Must not reject a request.
"""

from collections.abc import Callable, Coroutine, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from uvicorn.protocols.http.httptools_impl import STATUS_LINE

from relay.http.connections import AcceptedConnection
from relay.http.http_protocol import BoundedHttp
from relay.http.turn_end import LARGE_BYTES, turn_end_in
from schemas.addresses import MCP_PATHS

if TYPE_CHECKING:
    import asyncio

_PATHS = frozenset(path.encode("ascii") for path in MCP_PATHS)
_FAILED = 500


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


class DirectHttp(BoundedHttp):
    """HTTP within limits that answers what ``begin`` begins, and passes the rest to the ASGI application."""

    def __init__(self, *arguments: Any, begin: Begin | None = None, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._begin = begin
        self._turn_end = turn_end_in(self.app_state)
        self._held = b""
        """The answer that is sent at the end of the turn."""
        self._body: bytes | None = None
        """What was received of a body while it is not known whether it is answered here; None otherwise."""

    def connection_lost(self, exc: Exception | None) -> None:
        """End, and cancel the request that is answered here."""
        served = self._served
        super().connection_lost(exc)
        if isinstance(served, DirectCycle) and served.task is not None:
            # One that has not begun never comes to where ``_answer`` discards it.
            served.task.add_done_callback(self.tasks.discard)
            served.task.cancel()

    def data_received(self, data: bytes) -> None:
        """Parse ``data``; pass a request on whose body is incomplete."""
        self.send_held()
        super().data_received(data)
        if self._body is not None:
            body, self._body = self._body, None
            if not self.transport.is_closing():
                self._pass_on(body)

    def eof_received(self) -> None:
        """Send what is held: the transport closes now."""
        self.send_held()
        super().eof_received()

    def shutdown(self) -> None:
        """Close the connection once the request that is served is answered."""
        self.send_held()
        super().shutdown()

    def send_held(self) -> None:
        """Send what is held: before anything else is written, which it must not follow."""
        held, self._held = self._held, b""
        if held and not self.transport.is_closing():
            self.transport.write(held)

    def on_headers_complete(self) -> None:
        """End the head; the body decides who answers, if the head leaves it open."""
        if self._may_be_direct():
            self._in_head, self._in_body = False, True
            self._body = b""
            return
        super().on_headers_complete()
        if isinstance(self._served, DirectCycle) and not self._served.response_complete:
            # uvicorn stops reading while a request is queued: a disconnect would not be noticed.
            self.flow.resume_reading()

    def on_body(self, body: bytes) -> None:
        """Add to the body."""
        if self._body is None:
            super().on_body(body)
        else:
            self._body += body

    def on_message_complete(self) -> None:
        """End the request, and answer it or pass it on."""
        body, self._body = self._body, None
        if body is not None:
            work = self._begin_work(body)
            if work is not None:
                self._in_body = False
                self._start(work)
                return
            self._pass_on(body)
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
        )

    def _begin_work(self, body: bytes) -> PendingAnswer | None:
        path, _, query = self.url.partition(b"?")
        if self._begin is None or self.client is None or b"#" in query:
            return None
        return self._begin(WholeRequest(self.headers, self.client[0], self._connection, path, query, body))

    def _pass_on(self, body: bytes) -> None:
        super().on_headers_complete()
        if body:
            super().on_body(body)

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
