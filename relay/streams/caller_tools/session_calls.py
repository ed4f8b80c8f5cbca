"""The calls of callers for the sessions that this relay keeps, whichever relay they arrived at.

Arguments have passed their documents, and the call its checks, when ``run`` is called. Must not decide:
``caller_sessions`` does.
"""

from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Any

from pydantic_core import from_json

from relay.streams.caller_tools.caller_sessions import CallerSessions, Use
from relay.streams.caller_tools.polls import Polls, Push
from relay.streams.caller_tools.session import CallerSession

POLL_MS = 20_000
"""How long ``session_events`` waits for an event unless the caller says otherwise."""


class SessionTool(StrEnum):
    """The tools by which a caller uses sessions, by their canonical names."""

    MESSAGE = "session_message"
    EVENTS = "session_events"
    RESPONSE = "caller_tool_response"


def wait_ms_of(tool: SessionTool, arguments: Mapping[str, Any]) -> int:
    """Return how long a call waits for an event at most, in milliseconds."""
    if tool is SessionTool.RESPONSE:
        return 0
    wait_ms: int = arguments.get("wait_ms", POLL_MS if tool is SessionTool.EVENTS else 0)
    return wait_ms


class SessionCalls:
    """The calls for the sessions of one relay."""

    def __init__(self, sessions: CallerSessions, polls: Polls) -> None:
        self._sessions = sessions
        self._polls = polls

    async def run(
        self,
        tool: SessionTool,
        use: Use,
        push: Push | None,
        found: Callable[[CallerSession], None] = lambda _session: None,
    ) -> Mapping[str, Any]:
        """Return the result of a call of ``tool``.

        ``push`` sends each event as it happens; without it, the call returns at the first one. ``found`` is
        called with the session before the call waits.

        Raises:
            ToolError: as ``CallerSessions`` describes, and RATE_LIMITED if too many calls wait.
        """
        if tool is SessionTool.RESPONSE:
            session = self._sessions.respond(use)
            found(session)
            request_id = use.arguments["request_id"]
            return {"session_id": session.session_id, "request_id": request_id, "accepted": True}
        if tool is SessionTool.MESSAGE:
            session = self._sessions.message(use)
        else:
            session = self._sessions.session_of(use)
        found(session)
        after = use.arguments.get("after", 0)
        await self._wait(session, use, after, wait_ms_of(tool, use.arguments) / 1000, push)
        node = {"node_id": session.facts.node_id} if tool is SessionTool.MESSAGE else {}
        return {"session_id": session.session_id, **node, **_read(session, after)}

    async def _wait(
        self, session: CallerSession, use: Use, after: int, wait_s: float, push: Push | None
    ) -> None:
        if wait_s == 0 or session.has_ended:
            return
        if push is None:
            await self._polls.wait(session, use.principal, after, wait_s)
        else:
            await self._polls.stream(session, use.principal, after, wait_s, push)


def _read(session: CallerSession, after: int) -> dict[str, Any]:
    events = session.read(after)
    following = events[-1].cursor if events else session.events.newest
    return {
        "events": [from_json(event.text) for event in events],
        "next": following,
        "more": session.has_events(following),
        "missed": session.events.has_missed(after),
        "ended": session.has_ended,
    }
