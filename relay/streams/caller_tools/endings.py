"""Ends requests and sessions: the node gets the answer, the caller's events show it, and it is recorded.

Every end of a request passes ``Endings``, so that it ends once. Must not decide when something ends.
"""

from collections.abc import Callable
from enum import StrEnum
from typing import Any

from relay.streams.caller_tools.events import EventType
from relay.streams.caller_tools.outbox import Outbox
from relay.streams.caller_tools.records import CallerRecords
from relay.streams.caller_tools.registry import SessionRegistry
from relay.streams.caller_tools.requests import PendingRequest
from relay.streams.caller_tools.session import CallerSession
from relay.streams.caller_tools.shared_budget import SharedBudget
from schemas.caller_tools import MAX_ERROR_TEXT, CallerToolError, size_of
from schemas.frames import OneWayType
from schemas.payloads import CallerToolResult, SessionEnd


class SessionEnding(StrEnum):
    """Why a session has ended."""

    ENDED = "ended"  # by its caller
    DISCONNECTED = "caller_disconnected"  # its caller has left, and did not come back
    IDLE = "idle"
    REVOKED = "revoked"  # all its tokens have ended
    NODE_REVOKED = "node_revoked"  # or replaced: the node is sent nothing
    UNKNOWN = "unknown"  # there is no such session: the node alone is told


_WITHDRAWN = "withdrawn"


class Endings:
    """Ends requests and sessions. ``monotonic`` is in seconds."""

    def __init__(
        self,
        registry: SessionRegistry,
        outbox: Outbox,
        records: CallerRecords,
        budget: SharedBudget,
        monotonic: Callable[[], float],
    ) -> None:
        self._registry = registry
        self._outbox = outbox
        self._records = records
        self._budget = budget
        self._monotonic = monotonic

    def answer(self, session: CallerSession, request: PendingRequest, result: Any, size: int) -> None:
        """End ``request`` with the caller's result, of ``size`` bytes."""
        payload: CallerToolResult = {
            "session_id": session.session_id,
            "request_id": request.request_id,
            "result": result,
        }
        self._end(session, request, payload, size, "ok")

    def fail(
        self, session: CallerSession, request: PendingRequest, error: CallerToolError, text: str | None = None
    ) -> None:
        """End ``request`` with ``error``; ``text`` is the caller's own."""
        payload = error_payload(session.session_id, request.request_id, error, text)
        self._end(session, request, payload, size_of(payload), error.failure.value.code)
        if error is not CallerToolError.TOOL_FAILED:
            session.push(EventType.REQUEST_ENDED, {"request_id": request.request_id, "reason": error.value})

    def cancel(self, session: CallerSession, request_id: str) -> None:
        """End a request that the local agent has cancelled."""
        if self._is_withdrawn(session, request_id):
            session.push(EventType.REQUEST_CANCELLED, {"request_id": request_id})

    def withdraw(self, session: CallerSession, request_id: str) -> None:
        """End a request that the node does not know any more."""
        if self._is_withdrawn(session, request_id):
            session.push(EventType.REQUEST_ENDED, {"request_id": request_id, "reason": _WITHDRAWN})

    def leave(self, session: CallerSession, *, plainly: bool) -> None:
        """Note that the caller has closed a way to it, as ``CallerSession.leave`` has it."""
        session.leave(self._monotonic(), plainly=plainly)
        self._end_without_caller(session)

    def disconnect(self, session: CallerSession, connection: object) -> None:
        """Note that an MCP session by which ``session`` was used has ended, or has closed its stream."""
        session.disconnected(connection, self._monotonic())
        self._end_without_caller(session)

    def end_session(self, session: CallerSession, reason: SessionEnding) -> None:
        """End ``session`` and its requests, and withdraw its tools from the node."""
        self._disconnect_all(session)
        session.push(EventType.ENDED, {"reason": reason})
        session.end()
        self._registry.remove(session)
        # What waits for its events reads them once more, and they are freed with it.
        self._budget.give_back(session.facts.holder, session.lent.size + session.events.size)
        if reason is not SessionEnding.NODE_REVOKED:
            # The document of the frame has no reason of its own for a caller that has left.
            shown = SessionEnding.ENDED if reason is SessionEnding.DISCONNECTED else reason
            end: SessionEnd = {"session_id": session.session_id, "reason": shown}
            self._outbox.post(session.facts.node_id, OneWayType.SESSION_END, end)
        self._records.closed(session, reason)

    def _is_withdrawn(self, session: CallerSession, request_id: str) -> bool:
        """End a request without an answer, and return whether it was pending."""
        request = session.requests.withdraw(request_id)
        if request is None:
            return False
        session.events.discard(request_id)
        self._records.ended(session, request, _WITHDRAWN, self._monotonic())
        return True

    def _end_without_caller(self, session: CallerSession) -> None:
        if session.is_without_caller and not session.has_ended:
            self._disconnect_all(session)

    def _disconnect_all(self, session: CallerSession) -> None:
        for request in session.requests:
            self.fail(session, request, CallerToolError.DISCONNECTED)

    def _end(
        self,
        session: CallerSession,
        request: PendingRequest,
        payload: CallerToolResult,
        size: int,
        code: str,
    ) -> None:
        now = self._monotonic()
        session.requests.end(request.request_id, payload, size, now)
        session.events.discard(request.request_id)
        self._records.ended(session, request, code, now)
        self._outbox.post(session.facts.node_id, OneWayType.CALLER_TOOL_RESULT, payload)


def error_payload(
    session_id: str, request_id: str, error: CallerToolError, text: str | None = None
) -> CallerToolResult:
    """Return the answer that a request has failed; ``text`` is the caller's own."""
    message = error.failure.value.message if text is None else text[:MAX_ERROR_TEXT]
    return {
        "session_id": session_id,
        "request_id": request_id,
        "error": {"code": error.value, "message": message},
    }
