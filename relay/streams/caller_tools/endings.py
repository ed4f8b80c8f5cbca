"""Ends requests and sessions, in ``Endings``; finds what is over by its time, token or node, in ``Expiry``.

The node gets the answer, the caller's events show it, and it is recorded. Every end of a request passes
``Endings``, so that it ends once.
"""

import asyncio
from collections.abc import Callable
from enum import StrEnum
from typing import Any

from attrs import define, field
from structlog.typing import FilteringBoundLogger

from relay.auth.agent_tokens import Authenticator, Principal
from relay.streams.caller_tools.limits import SharedBudget, Timeouts
from relay.streams.caller_tools.outbox import Outbox
from relay.streams.caller_tools.records import CallerRecords
from relay.streams.caller_tools.registry import Nodes, SessionRegistry
from relay.streams.caller_tools.session import CallerSession, EventType, PendingRequest
from schemas.caller_tools import MAX_ERROR_TEXT, CallerToolError, size_of
from schemas.frames import OneWayType
from schemas.health import Loop
from schemas.payloads import CallerToolResult, SessionEnd
from schemas.tokens import TokenError


class SessionEnding(StrEnum):
    """Why a session has ended."""

    ENDED = "ended"  # by its caller
    DISCONNECTED = "caller_disconnected"  # its caller has left, and did not come back
    IDLE = "idle"
    REVOKED = "revoked"  # all its tokens have ended
    NODE_REVOKED = "node_revoked"  # or replaced: the node is sent nothing
    UNKNOWN = "unknown"  # there is no such session: the node alone is told


_WITHDRAWN = "withdrawn"


@define(eq=False, repr=False)
class Endings:
    """Ends requests and sessions. ``monotonic`` is in seconds."""

    _registry: SessionRegistry
    _outbox: Outbox
    _records: CallerRecords
    _budget: SharedBudget
    _monotonic: Callable[[], float]

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


INTERVAL_S = 0.25
_IDLE_S = 1.0
"""Without a session: one that is opened meanwhile lasts for longer."""
_ROUND_S = 60.0
_SESSIONS_EVERY = 4
"""Sessions are checked in every fourth round: there are thousands, and seconds do not matter to them."""


@define(eq=False, repr=False)
class Expiry:
    """Ends what is over at the time of each sweep. ``monotonic`` is in seconds."""

    _registry: SessionRegistry
    _endings: Endings
    _outbox: Outbox
    _nodes: Nodes
    _authenticator: Authenticator
    _timeouts: Timeouts
    _monotonic: Callable[[], float]
    _log: FilteringBoundLogger
    loop: Loop = field(init=False)

    def __attrs_post_init__(self) -> None:
        self.loop = Loop(self._monotonic)

    async def run(self) -> None:
        rounds = 0
        while True:
            self.loop.busy(_IDLE_S + _ROUND_S)
            await asyncio.sleep(INTERVAL_S if len(self._registry) or len(self._outbox) else _IDLE_S)
            try:
                self.sweep_requests()
                if rounds % _SESSIONS_EVERY == 0:
                    self.sweep_sessions()
            except Exception as error:  # noqa: BLE001 - a bug must be seen, and not stop what ends the rest
                self._log.error("sessions not swept", exc_info=error)
            rounds += 1

    def sweep_requests(self) -> None:
        """End the requests whose time is over, or whose caller has left; send what nodes can take by now."""
        now = self._monotonic()
        self._outbox.flush()
        self._each(self._sweep_requests_of, now)

    def sweep_sessions(self) -> None:
        self._each(self._sweep_session, self._monotonic())

    def _each(self, sweep: Callable[[CallerSession, float], None], now: float) -> None:
        for session in self._registry:
            try:
                sweep(session, now)
            except Exception as error:  # noqa: BLE001 - a bug with one session must not keep the others open
                self._log.error("session not swept", session_id=session.session_id, exc_info=error)

    def _sweep_requests_of(self, session: CallerSession, now: float) -> None:
        if session.is_abandoned(now):
            self._endings.end_session(session, SessionEnding.DISCONNECTED)
            return
        unreachable_s = session.unreachable_s(now)
        for request in session.requests:
            error = self._end_of(request, unreachable_s, now)
            if error is not None:
                self._endings.fail(session, request, error)

    def _sweep_session(self, session: CallerSession, now: float) -> None:
        session.requests.forget_before(now - self._timeouts.kept)
        if now - session.last_used >= self._timeouts.idle:
            self._endings.end_session(session, SessionEnding.IDLE)
        elif not any(map(self._is_accepted, session.tokens.values())):
            self._endings.end_session(session, SessionEnding.REVOKED)
        elif not self._is_with_its_node(session):
            self._endings.end_session(session, SessionEnding.NODE_REVOKED)

    def _end_of(self, request: PendingRequest, unreachable_s: float, now: float) -> CallerToolError | None:
        waited_s = now - request.arrived
        if waited_s >= self._timeouts.request:
            return CallerToolError.TIMEOUT
        out_of_reach_s = min(waited_s, unreachable_s)
        if not request.has_reached_caller and out_of_reach_s >= self._timeouts.unreachable:
            return CallerToolError.DISCONNECTED
        return None

    def _is_accepted(self, principal: Principal) -> bool:
        try:
            self._authenticator.check(principal)
        except TokenError:
            return False
        return True

    def _is_with_its_node(self, session: CallerSession) -> bool:
        facts = session.facts
        return self._nodes.is_trusted(facts.tenant, facts.node_id, facts.node_key)
