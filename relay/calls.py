"""The one door: every call, whatever transport it came by, goes through ``Door.call``.

identify, resolve, authorise, validate, limit, record the decision, dispatch, await, validate the result,
cross-check, record the outcome, answer. Nothing that a caller can be refused for happens before it. Must
not know transports: they are thin adapters around it.
"""

import json
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from structlog.typing import FilteringBoundLogger

from relay.audit import AuditLog, AuditUnavailableError
from relay.auth import Authenticator, Principal
from relay.catalog import Tool
from relay.fleet import Fleet
from relay.inflight import InFlight
from relay.limits import Allowance, Gates
from relay.meters import Meters
from relay.reach import Command, Reach
from relay.tally import Tally
from schemas.errors import Failure, ToolError
from schemas.projection import parse
from schemas.text import printable, printable_values
from schemas.tokens import TokenError
from schemas.ulids import UlidSource

GATEWAY_BUDGET_MS = 5000
"""RFC-0005 section 7: end to end, as the caller sees it."""


@dataclass(frozen=True, slots=True)
class CallRequest:
    """A call as it came: nothing in it has been checked."""

    token: str
    name: str
    arguments: Any


@dataclass(frozen=True, slots=True)
class CallAnswer:
    """A result or an error envelope (``error@1.0.0``), exactly one; ``text`` is it as ASCII JSON."""

    text: str
    result: Mapping[str, Any] | None = None
    error: Mapping[str, Any] | None = None


class Door:
    """Decides, dispatches and accounts for calls."""

    def __init__(  # noqa: PLR0913 - what comes in from outside
        self,
        *,
        authenticator: Authenticator,
        fleet: Fleet,
        reach: Reach,
        audit: AuditLog,
        tally: Tally,
        meters: Meters,
        ulids: UlidSource,
        per_agent: Allowance,
        monotonic: Callable[[], float],
        log: FilteringBoundLogger,
    ) -> None:
        self._authenticator = authenticator
        self._fleet = fleet
        self._reach = reach
        self._audit = audit
        self._tally = tally
        self._meters = meters
        self._ulids = ulids
        self._per_agent = per_agent
        self._agents: Gates[tuple[str, str, str]] = Gates(monotonic)
        self._capabilities: Gates[tuple[str, str]] = Gates(monotonic)
        self._in_flight = InFlight()
        self._monotonic = monotonic
        self._log = log

    async def call(self, request: CallRequest) -> CallAnswer:
        """Answer ``request``. Never raises but when cancelled: whatever goes wrong is an error envelope."""
        started = self._monotonic()
        record = _Record(self._ulids.new(), request.name)
        code = "cancelled"
        try:
            answer = await self._run(request, record, started)
            code = "ok"
        except ToolError as error:
            answer, code = _refusal(error, record), error.failure.value.code
        except AuditUnavailableError as error:
            self._log.error("audit cannot be written; calls are refused", reason=str(error))
            failed = ToolError(Failure.INTERNAL, "The call could not be recorded, so it was not made.")
            answer, code = _refusal(failed, record), Failure.INTERNAL.value.code
        except Exception as error:  # noqa: BLE001 - a bug must cost one caller an error, not the others the relay
            self._log.error("call failed", error=type(error).__name__, correlation_id=record.correlation_id)
            answer, code = _refusal(ToolError(Failure.INTERNAL), record), Failure.INTERNAL.value.code
        finally:
            duration_s = self._monotonic() - started
            self._meters.calls.labels(code).inc()
            self._meters.call_seconds.observe(duration_s)
            self._record_outcome(record, code, duration_s)
        return answer

    def charge(self, principal: Principal, cost: float) -> None:
        """Count something else than a call, of the weight of ``cost`` calls, towards the agent's share.

        Raises:
            ToolError: RATE_LIMITED, with ``retry_after_ms``.
        """
        with self._share_of(principal, min(cost, self._per_agent.burst)):
            pass

    def revoke(self, jtis: Collection[str]) -> None:
        """End the calls under way that were made with one of these tokens: E_SAFETY_DENIED."""
        self._in_flight.revoke(jtis)

    async def _run(self, request: CallRequest, record: "_Record", started: float) -> CallAnswer:
        principal = self._identify(request, record)
        with self._share_of(principal), ExitStack() as gates:
            try:
                tool = self._decide(request, principal)
                gates.enter_context(self._capabilities.passed(tool.capability, tool.allowance))
            except ToolError as error:
                self._audit.write(**record.facts(), decision="deny", code=error.failure.value.code)
                raise
            record.tool = tool
            self._audit.write(**record.facts(), decision="allow", code="ok")
            record.allowed = True
            command = self._command(request, tool, record, started)
            async with self._in_flight.under(principal.jti):
                answer = await self._reach.run(command)
            return _checked(answer, tool)

    def _identify(self, request: CallRequest, record: "_Record") -> Principal:
        try:
            record.principal = self._authenticator.identify(request.token)
        except TokenError:
            # It was accepted when the request came in: it has expired or was revoked since.
            denied = ToolError(Failure.SAFETY_DENIED, "The token is not accepted.")
            self._audit.write(**record.facts(), decision="deny", code=denied.failure.value.code)
            raise denied from None
        return record.principal

    @contextmanager
    def _share_of(self, principal: Principal, cost: float = 1) -> Iterator[None]:
        """Be within what one agent may take. Refusals are counted: one that does not stop fills no disk."""
        with ExitStack() as gates:
            try:
                gates.enter_context(self._agents.passed(principal.name, self._per_agent, cost))
            except ToolError as error:
                who = f"{principal.tenant}/{principal.sub}"
                self._tally.count("call_refused", who, error.failure.value.code)
                raise
            yield

    def _command(self, request: CallRequest, tool: Tool, record: "_Record", started: float) -> Command:
        spent_ms = int((self._monotonic() - started) * 1000)
        return Command(
            node_id=tool.node_id,
            tool=tool.canonical,
            arguments=request.arguments,
            deadline_ms=max(1, min(tool.deadline_ms, GATEWAY_BUDGET_MS - spent_ms)),
            correlation_id=record.correlation_id,
        )

    def _decide(self, request: CallRequest, principal: Principal) -> Tool:
        tool = self._fleet.resolve(request.name, principal.rights)
        if not tool.surface.arguments.is_valid(request.arguments):
            raise ToolError(Failure.ARGUMENTS_INVALID)
        return tool

    def _record_outcome(self, record: "_Record", code: str, duration_s: float) -> None:
        if not record.allowed:
            return  # the decision was the end of it
        try:
            outcome = "ok" if code == "ok" else "error"
            self._audit.write(
                **record.facts(), outcome=outcome, code=code, duration_ms=round(duration_s * 1000, 3)
            )
        except AuditUnavailableError as error:
            # It has run; the caller gets the truth. The next call finds the door shut.
            self._log.error("outcome not recorded", reason=str(error), correlation_id=record.correlation_id)


@dataclass(slots=True)
class _Record:
    """What the audit says of one call."""

    correlation_id: str
    name: str
    principal: Principal | None = None
    tool: Tool | None = None
    allowed: bool = False

    def facts(self) -> dict[str, Any]:
        principal = self.principal
        parsed = None if self.tool else parse(self.name)
        return {
            "correlation_id": self.correlation_id,
            "tenant": principal.tenant if principal else None,
            "iss": principal.issuer if principal else None,
            "sub": principal.sub if principal else None,
            "jti": principal.jti if principal else None,
            "tool": self.tool.canonical if self.tool else printable(self.name, 64),
            "node_id": self.tool.node_id if self.tool else parsed.node_id if parsed else None,
        }


def _checked(answer: Mapping[str, Any], tool: Tool) -> CallAnswer:
    """Answer with the node's result if it fits the tool and is this node's own (RFC-0005 section 6.8)."""
    if not answer["ok"]:
        raise ToolError.from_node(answer["error"])
    result: Mapping[str, Any] = answer["result"]
    if not tool.surface.result.is_valid(result):
        raise ToolError(Failure.RESULT_INVALID)
    if result.get("node_id") != tool.node_id:
        raise ToolError(Failure.RESULT_INVALID, "The result names another node than the one that was called.")
    text = json.dumps(result)
    if "\\" in text or "\x7f" in text:
        # Something had to be escaped for JSON, and a client would unescape it: a mount point is named by
        # whoever plugs in a stick, and no control character of it may reach a terminal or a model.
        result = printable_values(result)
        if not tool.surface.result.is_valid(result):
            raise ToolError(Failure.RESULT_INVALID)  # escaped it is longer, and a client would refuse it
        text = json.dumps(result)
    return CallAnswer(text, result=result)


def _refusal(error: ToolError, record: _Record) -> CallAnswer:
    envelope = error.envelope(record.correlation_id)
    return CallAnswer(json.dumps(envelope), error=envelope)
