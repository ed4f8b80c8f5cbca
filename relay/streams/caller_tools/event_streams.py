"""Events on their way to callers: by long polls, by responses that stream, by streams of MCP sessions.

One task for each session on an event stream, those of the old era, reads from the session's own buffer, so a
client that does not read holds up nothing else. A stream is given events of its own principal only, while its
token is accepted. Must not know MCP: what sends is passed in.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from weakref import WeakKeyDictionary

from attrs import define, field
from structlog.typing import FilteringBoundLogger

from relay.auth.agent_tokens import AgentName, Authenticator, Principal
from relay.calls.stream_port import SendEvent, SessionEvents
from relay.streams.caller_tools.endings import Endings
from relay.streams.caller_tools.registry import Nodes
from relay.streams.caller_tools.session import MAX_POLLS, CallerSession
from schemas.caller_tools import CallerToolError
from schemas.errors import Failure, ToolError
from schemas.tally import Tally
from schemas.tokens import TokenError

Push = Callable[[str], Awaitable[None]]
"""Sends an event, which is JSON, on the response stream of a call."""
_RETRY_MS = 1000


@define(eq=False, repr=False)
class Polls:
    """The waiting calls of all agents. ``monotonic`` is in seconds."""

    _endings: Endings
    _monotonic: Callable[[], float]
    _open: Tally[AgentName] = field(init=False, factory=Tally)

    async def wait(self, session: CallerSession, after: int, wait_s: float) -> None:
        """Return when there is an event behind ``after``, when the session has ended, or after ``wait_s``."""
        with session.polled(self._monotonic), suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                await session.wait_for_events(after)

    async def stream(self, session: CallerSession, after: int, wait_s: float, push: Push) -> None:
        """Push the events behind ``after`` for ``wait_s``, or until the session ends.

        If the call is cancelled, the caller has disconnected: it cannot answer what reached it by this stream
        alone.
        """
        key = object()
        session.open_stream(key)
        try:
            async with asyncio.timeout(wait_s):
                async for event in session.events_behind(after):
                    await push(event.text)
                    session.sent(event, key)
        except TimeoutError:
            pass
        except BaseException:
            for request in session.close_stream(key, self._monotonic()):
                self._endings.fail(session, request, CallerToolError.DISCONNECTED)
            raise
        for request in session.close_stream(key, self._monotonic()):
            request.delivered = True

    @contextmanager
    def held(self, principal: Principal) -> Iterator[None]:
        """Count a call that may wait, for the length of the block.

        Raises:
            ToolError: RATE_LIMITED: the agent has too many open.
        """
        if self._open[principal.name] >= MAX_POLLS:
            text = "Too many calls wait for events; end one."
            raise ToolError(Failure.RATE_LIMITED, text, retry_after_ms=_RETRY_MS)
        self._open[principal.name] += 1
        try:
            yield
        finally:
            self._open[principal.name] -= 1


LeaveElsewhere = Callable[[str, AgentName], None]
"""Notes that a caller has left a session, by its id, that another relay keeps."""


@define(eq=False, repr=False)
class EventStream:
    """The event stream of one MCP session.

    Attributes:
        principal: of the caller that has it open, by its latest token; None while it is closed.
        cursors: up to where each session was sent. An ended one is freed with the last that needs it: a
            stream that is never opened must not keep it.
        elsewhere: the sessions that other relays keep, by id, each with its caller.
    """

    send: SendEvent
    principal: Principal | None = field(init=False, default=None)
    cursors: WeakKeyDictionary[CallerSession, int] = field(init=False, factory=WeakKeyDictionary)
    tasks: dict[CallerSession, asyncio.Task[None]] = field(init=False, factory=dict)
    elsewhere: dict[str, AgentName] = field(init=False, factory=dict)


@define(eq=False, repr=False)
class EventStreams(SessionEvents):
    """The streams of all callers, by the ids of their MCP sessions. ``monotonic`` is in seconds."""

    _authenticator: Authenticator
    _nodes: Nodes
    _endings: Endings
    _leave_elsewhere: LeaveElsewhere | None
    _monotonic: Callable[[], float]
    _log: FilteringBoundLogger
    _streams: dict[str, EventStream] = field(init=False, factory=dict)

    def attach(self, stream_id: str, send: SendEvent) -> None:
        self._streams.setdefault(stream_id, EventStream(send))

    def detach(self, stream_id: str) -> None:
        self.closed(stream_id)
        self._streams.pop(stream_id, None)

    def opened(self, stream_id: str, principal: Principal) -> None:
        stream = self._streams.get(stream_id)
        if stream is None or stream.principal is not None:
            return
        stream.principal = principal
        for session in list(stream.cursors):
            self._start(stream, session)

    def renewed(self, stream_id: str, principal: Principal) -> None:
        stream = self._streams.get(stream_id)
        if stream is None or stream.principal is None:
            return
        stream.principal = principal
        for session in list(stream.cursors):
            if session not in stream.tasks:  # its events met a token that had ended
                self._start(stream, session)

    def closed(self, stream_id: str) -> None:
        stream = self._streams.get(stream_id)
        if stream is None:
            return
        stream.principal = None
        for session in list(stream.cursors):
            if session in stream.tasks:
                self._stop(stream, session)
            self._endings.disconnect(session, stream)
        while stream.elsewhere and self._leave_elsewhere is not None:
            self._leave_elsewhere(*stream.elsewhere.popitem())

    def follow(self, stream_id: str, session: CallerSession, principal: Principal) -> None:
        """Send the events of ``session`` on the stream, from now on, while it is open."""
        stream = self._streams.get(stream_id)
        if stream is None or (stream.principal is not None and stream.principal.name != principal.name):
            return
        session.connected(stream)
        if session in stream.cursors:
            return
        stream.cursors[session] = 0
        if stream.principal is not None:
            self._start(stream, session)

    def follow_elsewhere(self, stream_id: str, session_id: str, caller: AgentName, *, ended: bool) -> None:
        """Note a session of another relay that is used in the MCP session: its events are not sent here."""
        stream = self._streams.get(stream_id)
        if stream is None:
            return
        if ended:
            stream.elsewhere.pop(session_id, None)
        else:
            stream.elsewhere[session_id] = caller

    def _start(self, stream: EventStream, session: CallerSession) -> None:
        if session.has_ended or stream.principal is None or stream.principal.name != session.principal:
            del stream.cursors[session]
            return
        session.connected(stream)
        session.open_stream(stream)
        stream.tasks[session] = asyncio.create_task(self._run(stream, session))

    async def _run(self, stream: EventStream, session: CallerSession) -> None:
        try:
            async for event in session.events_behind(stream.cursors[session]):
                if stream.principal is None:
                    break
                self._authenticator.check(stream.principal)
                if not self._nodes.reached(stream.principal.rights, session.node_id):
                    break  # its token is not for the node, or not any more
                if await stream.send(event.text):
                    session.sent(event, stream)
                stream.cursors[session] = event.cursor
        except TokenError:
            pass  # its holder may not read any more; another token may
        except Exception as error:  # noqa: BLE001 - a bug must end one stream, and be seen
            self._log.error("events not sent", session_id=session.session_id, exc_info=error)
        if stream.tasks.get(session) is asyncio.current_task():
            self._stop(stream, session)
            if session.has_ended:
                stream.cursors.pop(session, None)

    def _stop(self, stream: EventStream, session: CallerSession) -> None:
        task = stream.tasks.pop(session)
        if task is not asyncio.current_task():
            task.cancel()
        for request in session.close_stream(stream, self._monotonic()):
            if not session.has_ended:
                self._endings.fail(session, request, CallerToolError.DISCONNECTED)
