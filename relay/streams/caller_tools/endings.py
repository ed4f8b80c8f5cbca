"""Ends requests and sessions, in ``Endings``; finds what is over by its time, token or node, in ``Expiry``.

The node gets the answer by ``Outbox``, the caller's events show it, and ``CallerRecords`` writes it to audit,
log and metrics, which must never be given arguments, results, messages, or any text of a caller or a local
agent. Every end of a request passes ``Endings``, so that it ends once.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Any

from attrs import define, field
from structlog.typing import FilteringBoundLogger

from relay.audit.refusal_counts import RefusalCounter, RefusalEvent, RefusalReason
from relay.audit.writer import AuditWriter
from relay.auth.agent_tokens import Authenticator, Principal
from relay.observability.ascii_json import members_of
from relay.observability.metrics import Metrics
from relay.routing.port import NodeFrames, NodeRef
from relay.streams.caller_tools.registry import Nodes, SessionRegistry
from relay.streams.caller_tools.session import (
    CallerSession,
    EventType,
    PendingRequest,
    SharedBudget,
    Timeouts,
)
from schemas.caller_tools import MAX_ERROR_TEXT, MAX_SESSIONS, SESSIONS_LAST_S, CallerToolError, size_of
from schemas.errors import Failure, ToolError
from schemas.frames import OneWayType
from schemas.health import Loop
from schemas.payloads import CallerToolResult, SessionEnd
from schemas.tally import Tally
from schemas.text import printable
from schemas.tokens import TokenError

_RETRY_MS = 1000
MAX_WAITING = 1024
"""The frames that wait for one node."""
MAX_WAITING_BYTES = 16 << 20
"""Their size: more than the tools of all sessions of one node."""
MAX_WAITING_BYTES_OF_ALL = 256 << 20
"""The size of what waits for all nodes: one has at most as much as is left free, so that others find room."""


@define(eq=False, repr=False)
class Outbox:
    """What waits for each node. ``on_dropped`` is called with the type of each frame that does not fit."""

    _frames: NodeFrames
    _log: FilteringBoundLogger
    _on_dropped: Callable[[OneWayType], None] = lambda _: None
    _waiting: dict[str, deque[tuple[OneWayType, Mapping[str, Any], int]]] = field(init=False, factory=dict)
    _bytes: Tally[str] = field(init=False, factory=Tally)
    _bytes_of_all: int = field(init=False, default=0)
    _overflowing: set[str] = field(init=False, factory=set)

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def send(self, node_id: str, type_: OneWayType, payload: Mapping[str, Any]) -> None:
        """Send a frame now, behind what waits.

        Raises:
            ToolError: NODE_OFFLINE or RATE_LIMITED; nothing was sent.
        """
        if not self._flushed(node_id):
            raise ToolError(Failure.RATE_LIMITED, "The node does not read.", retry_after_ms=_RETRY_MS)
        self._frames.send(node_id, type_, payload)

    def post(self, node_id: str, type_: OneWayType, payload: Mapping[str, Any]) -> None:
        """Send a frame as soon as the node can take it; it is dropped if the node is not connected."""
        if self._flushed(node_id) and self._is_done(node_id, type_, payload):
            return
        waiting = self._waiting.setdefault(node_id, deque())
        # Of a node that overflows none is measured.
        size = size_of(payload) if len(waiting) < MAX_WAITING else 0
        # An end always waits: a session is opened only when nothing does, so that there are few.
        if type_ is not OneWayType.SESSION_END and not self._has_room(node_id, type_, size):
            self._on_dropped(type_)
            # A node that sends requests and does not read the answers; it requests them again.
            if node_id not in self._overflowing:
                self._overflowing.add(node_id)
                self._log.warning("frames dropped: the node does not read", node_id=node_id)
            return
        waiting.append((type_, payload, size))
        self._count(node_id, size)

    def _has_room(self, node_id: str, type_: OneWayType, size: int) -> bool:
        size += self._bytes[node_id]
        if len(self._waiting[node_id]) >= MAX_WAITING or size > MAX_WAITING_BYTES:
            return False
        # What a session lends is kept in any case, and one that is not named ends at the node.
        return type_ is OneWayType.SESSION_OPEN or size <= MAX_WAITING_BYTES_OF_ALL - self._bytes_of_all

    def _count(self, node_id: str, size: int) -> None:
        self._bytes[node_id] += size
        self._bytes_of_all += size

    def drop(self, node_id: str) -> None:
        """Drop what waits for a node whose connection is lost."""
        self._waiting.pop(node_id, None)
        self._count(node_id, -self._bytes[node_id])
        self._overflowing.discard(node_id)

    def flush(self) -> None:
        for node_id in list(self._waiting):
            self._flushed(node_id)

    def _flushed(self, node_id: str) -> bool:
        """Send what waits for a node; return whether nothing is left."""
        waiting = self._waiting.get(node_id)
        while waiting:
            type_, payload, size = waiting[0]
            if not self._is_done(node_id, type_, payload):
                return False
            waiting.popleft()
            self._count(node_id, -size)
        self.drop(node_id)
        return True

    def _is_done(self, node_id: str, type_: OneWayType, payload: Mapping[str, Any]) -> bool:
        """Send a frame; return whether it need not wait."""
        try:
            self._frames.send(node_id, type_, payload)
        except Exception as error:  # noqa: BLE001 - a bug with one frame must not hold up those behind it
            failure = error.failure if isinstance(error, ToolError) else None
            if failure is Failure.RATE_LIMITED:
                return False
            if failure is not Failure.NODE_OFFLINE:
                self._log.error("frame not sent", node_id=node_id, type=type_.value, exc_info=error)
        return True


_MAX_SHOWN_ID = 640  # 64 characters, each as an escape


@define(eq=False, repr=False)
class CallerRecords:
    """Records what was decided, and how it ended."""

    _audit: AuditWriter
    _refusals: RefusalCounter
    _metrics: Metrics
    _log: FilteringBoundLogger

    async def opened(self, session: CallerSession, principal: Principal, correlation_id: str) -> None:
        """Record that a session is opened.

        Raises:
            AuditUnavailableError: it cannot be recorded, so it must not be opened.
        """
        members = members_of(
            {"session_id": session.session_id, "node_id": session.node_id, "caller_id": session.caller_id}
        )
        await self._audit.record(
            f'"event":"caller_session_opened","correlation_id":"{correlation_id}",{principal.members},{members}'
        )
        self._metrics.caller_sessions.inc()
        self._log.info("session opened", session_id=session.session_id, node_id=session.node_id)

    def closed(self, session: CallerSession, reason: StrEnum) -> None:
        self._metrics.caller_sessions.dec()
        self._log.info("session ended", session_id=session.session_id, node_id=session.node_id, reason=reason)
        members = members_of(
            {"session_id": session.session_id, "tenant": session.tenant, "node_id": session.node_id}
        )
        self._audit.note(f'"event":"caller_session_ended",{members},"reason":"{reason}"')

    def allowed(self, session: CallerSession, request: PendingRequest) -> None:
        """Record that a request is passed to the caller, before it is.

        Raises:
            AuditUnavailableError: it cannot be recorded, so it must not be passed.
        """
        members, code = _members(session, request), Failure.INTERNAL.value.code
        self._audit.decide(
            f'{members},"decision":"allow","code":"ok"',
            f'{members},"outcome":"error","code":"{code}","duration_ms":0.0',
        )

    def refused(self, node_id: str, reason: StrEnum) -> None:
        self._metrics.caller_requests.labels(reason).inc()
        if self._refusals.count(RefusalEvent.CALLER_TOOL_REFUSED, node_id, reason):
            self._log.warning("caller tool refused", node_id=node_id, reason=reason)

    def ended(self, session: CallerSession, request: PendingRequest, code: str, now: float) -> None:
        """Record how a request ended; ``code`` is of the failure table, or ok."""
        self._metrics.caller_requests.labels(code).inc()
        outcome = "ok" if code == "ok" else "error"
        duration_ms = round((now - request.arrived) * 1000, 3)
        self._audit.note(
            f'{_members(session, request)},"outcome":"{outcome}","code":"{code}","duration_ms":{duration_ms}',
            request.correlation_id,
        )

    def frame_dropped(self, type_: OneWayType) -> None:
        """Count a frame to a node for which too many wait."""
        self._metrics.one_way_frames.labels(type_, "dropped").inc()

    def unexpected_answer(self, principal: Principal, session: CallerSession, request_id: str) -> None:
        """Record an answer to a request that is not pending."""
        who = f"{principal.tenant}/{principal.sub}"
        self._refusals.count(RefusalEvent.CALL_REFUSED, who, RefusalReason.REQUEST_UNKNOWN)
        # Each, as the specification has it: the rate of its agent bounds them, as it does the access log.
        self._log.warning(
            "answer to no pending request ignored",
            session_id=session.session_id,
            request_id=printable(request_id, _MAX_SHOWN_ID),
        )


def _members(session: CallerSession, request: PendingRequest) -> str:
    issuer, tenant, sub = session.principal
    return members_of(
        {
            "event": "caller_tool",
            "correlation_id": request.correlation_id,
            "tenant": tenant,
            "iss": issuer,
            "sub": sub,
            "session_id": session.session_id,
            "request_id": request.request_id,
            "tool": request.tool,
            "node_id": session.node_id,
        }
    )


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
    _ends: dict[tuple[str, str], list[tuple[float, SessionEnd]]] = field(init=False, factory=dict)

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

    def withdraw(self, session: CallerSession, request_id: str, *, cancelled: bool) -> None:
        """End a request without an answer: the local agent has ``cancelled`` it, or its node has lost it."""
        request = session.requests.withdraw(request_id)
        if request is None:
            return
        session.events.discard(request_id)
        self._records.ended(session, request, _WITHDRAWN, self._monotonic())
        if cancelled:
            session.push(EventType.REQUEST_CANCELLED, {"request_id": request_id})
        else:
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
        self._budget.give_back(session.holder, session.lent.size + session.events.size)
        if reason is not SessionEnding.NODE_REVOKED:
            # The document of the frame has no reason of its own for a caller that has left.
            shown = SessionEnding.ENDED if reason is SessionEnding.DISCONNECTED else reason
            end: SessionEnd = {"session_id": session.session_id, "reason": shown}
            ends = self._ends.setdefault((session.tenant, session.node_id), [])
            ends.append((self._monotonic(), end))
            del ends[:-MAX_SESSIONS]
            self._outbox.post(session.node_id, OneWayType.SESSION_END, end)
        self._records.closed(session, reason)

    def ends_of(self, node: NodeRef) -> list[SessionEnd]:
        """Return the latest ends of sessions with ``node``: the frames may be lost with its connection."""
        return [end for _, end in self._ends.get((node.tenant, node.node_id), ())]

    def forget_ends(self) -> None:
        """Forget the ends that are told no more."""
        since = self._monotonic() - SESSIONS_LAST_S
        for node, ends in list(self._ends.items()):
            if ends[-1][0] < since:
                del self._ends[node]

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
        self._outbox.post(session.node_id, OneWayType.CALLER_TOOL_RESULT, payload)


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
        self._outbox.flush()
        self._each(self._sweep_requests_of)

    def sweep_sessions(self) -> None:
        self._endings.forget_ends()
        self._each(self._sweep_session)

    def _each(self, sweep: Callable[[CallerSession, float], None]) -> None:
        now = self._monotonic()
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
            waited_s = now - request.arrived
            is_lost = min(waited_s, unreachable_s) >= self._timeouts.unreachable
            if waited_s >= self._timeouts.request:
                self._endings.fail(session, request, CallerToolError.TIMEOUT)
            elif is_lost and not request.has_reached_caller:
                self._endings.fail(session, request, CallerToolError.DISCONNECTED)

    def _sweep_session(self, session: CallerSession, now: float) -> None:
        session.requests.forget_before(now - self._timeouts.kept)
        if now - session.last_used >= self._timeouts.idle:
            self._endings.end_session(session, SessionEnding.IDLE)
        elif not any(self._is_accepted(used, session.node_id) for used in session.tokens.values()):
            self._endings.end_session(session, SessionEnding.REVOKED)
        elif not self._nodes.is_trusted(session.tenant, session.node_id, session.node_key):
            self._endings.end_session(session, SessionEnding.NODE_REVOKED)

    def _is_accepted(self, principal: Principal, node_id: str) -> bool:
        try:
            self._authenticator.check(principal)
        except TokenError:
            return False
        return self._nodes.reached(principal.rights, node_id)
