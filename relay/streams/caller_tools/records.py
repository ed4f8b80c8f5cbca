"""What the audit, the log and the metrics show of sessions and requests.

Must never be given arguments, results, messages, or any text of a caller or a local agent.
"""

from enum import StrEnum

from attrs import define
from structlog.typing import FilteringBoundLogger

from relay.ascii_json import members_of
from relay.audit.log import AuditLog, AuditUnavailableError
from relay.audit.refusal_counts import RefusalCounter, RefusalEvent, RefusalReason
from relay.auth.agent_tokens import Principal
from relay.observability.metrics import Metrics
from relay.streams.caller_tools.session import CallerSession, PendingRequest
from schemas.frames import OneWayType
from schemas.text import printable

_MAX_SHOWN_ID = 640  # 64 characters, each as an escape


@define(eq=False, repr=False)
class CallerRecords:
    """Records what was decided, and how it ended."""

    _audit: AuditLog
    _refusals: RefusalCounter
    _metrics: Metrics
    _log: FilteringBoundLogger

    def opened(self, session: CallerSession, principal: Principal, correlation_id: str) -> None:
        """Record that a session is opened.

        Raises:
            AuditUnavailableError: it cannot be recorded, so it must not be opened.
        """
        facts = session.facts
        members = members_of(
            {"session_id": facts.session_id, "node_id": facts.node_id, "caller_id": facts.caller_id}
        )
        self._audit.append(
            f'"event":"caller_session_opened","correlation_id":"{correlation_id}",{principal.members},{members}'
        )
        self._metrics.caller_sessions.inc()
        self._log.info("session opened", session_id=facts.session_id, node_id=facts.node_id)

    def closed(self, session: CallerSession, reason: StrEnum) -> None:
        """Record that a session has ended."""
        facts = session.facts
        self._metrics.caller_sessions.dec()
        self._log.info("session ended", session_id=facts.session_id, node_id=facts.node_id, reason=reason)
        members = members_of(
            {"session_id": facts.session_id, "tenant": facts.tenant, "node_id": facts.node_id}
        )
        self._write(f'"event":"caller_session_ended",{members},"reason":"{reason}"')

    def allowed(self, session: CallerSession, request: PendingRequest) -> None:
        """Record that a request is passed to the caller, before it is.

        Raises:
            AuditUnavailableError: it cannot be recorded, so it must not be passed.
        """
        self._audit.append(f'{_members(session, request)},"decision":"allow","code":"ok"')

    def refused(self, node_id: str, reason: StrEnum) -> None:
        """Count a request of a node that is refused."""
        self._metrics.caller_requests.labels(reason).inc()
        if self._refusals.count(RefusalEvent.CALLER_TOOL_REFUSED, node_id, reason):
            self._log.warning("caller tool refused", node_id=node_id, reason=reason)

    def ended(self, session: CallerSession, request: PendingRequest, code: str, now: float) -> None:
        """Record how a request ended; ``code`` is of the failure table, or ok."""
        self._metrics.caller_requests.labels(code).inc()
        outcome = "ok" if code == "ok" else "error"
        duration_ms = round((now - request.arrived) * 1000, 3)
        self._write(
            f'{_members(session, request)},"outcome":"{outcome}","code":"{code}","duration_ms":{duration_ms}'
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

    def _write(self, members: str) -> None:
        """Write a line about something that has happened: it cannot be refused any more."""
        try:
            self._audit.append(members)
        except AuditUnavailableError as error:
            self._log.error("outcome not recorded", reason=str(error))


def _members(session: CallerSession, request: PendingRequest) -> str:
    issuer, tenant, sub = session.facts.principal
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
            "node_id": session.facts.node_id,
        }
    )
