"""Waits for the events of a session: long polls, and calls whose response is a stream.

An agent has a limited number of them open. Must not know what an event is for.
"""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

from relay.auth.agent_tokens import AgentName, Principal
from relay.streams.caller_tools.endings import Endings
from relay.streams.caller_tools.limits import MAX_POLLS, MAX_RESULT_BYTES
from relay.streams.caller_tools.session import CallerSession
from schemas.caller_tools import CallerToolError
from schemas.errors import Failure, ToolError

Push = Callable[[str], Awaitable[None]]
"""Sends an event, which is JSON, on the response stream of a call."""
_RETRY_MS = 1000


class Polls:
    """The waiting calls of all agents. ``monotonic`` is in seconds."""

    def __init__(self, endings: Endings, monotonic: Callable[[], float]) -> None:
        self._endings = endings
        self._monotonic = monotonic
        self._open = Counter[AgentName]()

    async def wait(self, session: CallerSession, principal: Principal, after: int, wait_s: float) -> None:
        """Return when there is an event behind ``after``, when the session has ended, or after ``wait_s``.

        Raises:
            ToolError: RATE_LIMITED: the agent has too many open.
        """
        with self._held(principal), session.polled(self._monotonic):
            try:
                async with asyncio.timeout(wait_s):
                    while not (session.has_events(after) or session.has_ended):
                        await session.changed().wait()
            except TimeoutError:
                return

    async def stream(
        self, session: CallerSession, principal: Principal, after: int, wait_s: float, push: Push
    ) -> None:
        """Push the events behind ``after`` for ``wait_s``, or until the session ends.

        If the call is cancelled, the caller has disconnected: it cannot answer what reached it by this stream
        alone.

        Raises:
            ToolError: RATE_LIMITED: the agent has too many open.
        """
        key = object()
        with self._held(principal):
            session.open_stream(key)
            try:
                async with asyncio.timeout(wait_s):
                    await self._push_all(session, key, after, push)
            except TimeoutError:
                pass
            except BaseException:
                for request in session.close_stream(key, self._monotonic()):
                    self._endings.fail(session, request, CallerToolError.DISCONNECTED)
                raise
            for request in session.close_stream(key, self._monotonic()):
                request.delivered = True

    async def _push_all(self, session: CallerSession, key: object, after: int, push: Push) -> None:
        cursor = after
        while True:
            changed = session.changed()
            events = session.events.after(cursor, MAX_RESULT_BYTES)
            for event in events:
                await push(event.text)
                session.sent(event, key)
                cursor = event.cursor
            if not events:
                if session.has_ended:
                    return
                await changed.wait()

    @contextmanager
    def _held(self, principal: Principal) -> Iterator[None]:
        if self._open[principal.name] >= MAX_POLLS:
            text = "Too many calls wait for events; end one."
            raise ToolError(Failure.RATE_LIMITED, text, retry_after_ms=_RETRY_MS)
        self._open[principal.name] += 1
        try:
            yield
        finally:
            self._open[principal.name] -= 1
            if not self._open[principal.name]:
                del self._open[principal.name]
