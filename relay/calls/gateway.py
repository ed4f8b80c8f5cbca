"""The call gateway: every call of every transport passes ``CallGateway.call``.

Identify, limit, read, resolve, authorise, validate, record the decision, dispatch, await, validate the
result, cross-check, record the outcome, answer. No check of a call is made before it. Must not know
transports: they are thin adapters around it.
"""

from collections.abc import Callable, Collection, Mapping
from typing import Any

from structlog.typing import FilteringBoundLogger

from relay.ascii_json import encoded
from relay.audit.log import AuditLog, AuditUnavailableError
from relay.audit.refusal_counts import RefusalCounter, RefusalEvent
from relay.auth.agent_tokens import AgentName, Authenticator, Principal
from relay.calls.access_log import AccessLog
from relay.calls.call_record import CallAnswer, CallRecord, CallRequest
from relay.calls.envelope import Call, EnvelopeCheck, wants_logs
from relay.calls.executor import CallExecutor
from relay.calls.idempotent_calls import IdempotentCalls
from relay.calls.offline import explained, is_offline
from relay.calls.relay_tools import RelayTool, RelayTools
from relay.calls.sample_streams import SampleStreams
from relay.calls.spans import span_of
from relay.fleet.fleet import Fleet
from relay.fleet.tools import Tool
from relay.limits.allowance import Allowance
from relay.limits.rate_limits import KeyedLimiters, Limiter
from relay.observability.metrics import Metrics
from relay.settings.config import EnvelopeMode
from schemas.errors import Failure, ToolError
from schemas.process.spans import SpanSink, no_spans
from schemas.projection import META_PROGRESS_TOKEN, parse
from schemas.tokens import TokenError
from schemas.ulids import UlidSource
from schemas.violations import ViolationError

_MALFORMED_ID = "The correlation id of the call is malformed."
_FORM_OF_ID = "Send 1 to 64 letters, digits and ._- in _meta or the header X-Correlation-Id, or no id."


class CallGateway:
    """Decides, dispatches and records calls."""

    def __init__(  # noqa: PLR0913 - what comes in from outside
        self,
        *,
        authenticator: Authenticator,
        envelopes: EnvelopeCheck,
        fleet: Fleet,
        relay_tools: RelayTools,
        streams: SampleStreams,
        executor: CallExecutor,
        idempotent_calls: IdempotentCalls,
        audit: AuditLog,
        refusals: RefusalCounter,
        metrics: Metrics,
        access_log: AccessLog,
        ulids: UlidSource,
        per_agent: Allowance,
        revocations_known: Callable[[], bool],
        now_ms: Callable[[], int],
        monotonic: Callable[[], float],
        log: FilteringBoundLogger,
        spans: SpanSink = no_spans,
    ) -> None:
        self._authenticator = authenticator
        self._envelopes = envelopes
        self._fleet = fleet
        self._relay_tools = relay_tools
        self._streams = streams
        self._executor = executor
        self._idempotent_calls = idempotent_calls
        self._audit = audit
        self._refusals = refusals
        self._metrics = metrics
        self._access_log = access_log
        self._ulids = ulids
        self._per_agent = per_agent
        self._revocations_known = revocations_known
        self._agents = KeyedLimiters[AgentName](monotonic)
        self._now_ms = now_ms
        self._monotonic = monotonic
        self._log = log
        self._spans = spans

    def change(self, per_agent: Allowance, mode: EnvelopeMode) -> None:
        """Apply other limits of an agent, and another check of envelopes, to the calls from now on."""
        self._per_agent = per_agent
        self._envelopes.mode = mode

    async def call(self, request: CallRequest) -> CallAnswer:
        """Answer ``request``. Raises only when cancelled: every failure is an error envelope."""
        record = CallRecord(self._ulids.new(), request.call, self._monotonic(), request)
        answer: CallAnswer | None = None
        try:
            answer = await self._answered(request, record)
            # Not by ``_replace``, which takes four times as long.
            return CallAnswer(
                answer.text, answer.result, answer.error, answer.hop, record.correlation_id, answer.images
            )
        finally:
            self._account(request, record, answer)

    async def _answered(self, request: CallRequest, record: CallRecord) -> CallAnswer:
        try:
            return await self._run(request, record)
        except ToolError as error:
            record.error = self._with_absence(error, record) if is_offline(error) else error
        except AuditUnavailableError as error:
            self._log.error(
                "audit cannot be written; calls are refused",
                reason=str(error),
                correlation_id=record.correlation_id,
            )
            record.error = ToolError(Failure.INTERNAL, "The call could not be recorded, so it was not made.")
        except Exception as error:  # noqa: BLE001 - a bug must fail one call, not the relay
            self._log.error("call failed", correlation_id=record.correlation_id, exc_info=error)
            record.error = ToolError(Failure.INTERNAL)
        envelope = record.error.envelope(record.correlation_id)
        return CallAnswer(encoded(envelope), error=envelope, hop=record.hop)

    def _with_absence(self, error: ToolError, record: CallRecord) -> ToolError:
        tool, principal = record.tool, record.principal
        if not isinstance(tool, Tool) or principal is None:
            return error
        node = self._fleet.node_of(principal.tenant, tool.node_id)
        if node is None or node.connected:
            return error  # it is gone, or has returned meanwhile
        return explained(error, node.since_ms, self._now_ms())

    def streams(self, params: Mapping[str, Any]) -> bool:
        """Return whether a call with ``params`` may send notifications before its result."""
        name, meta = params.get("name"), params.get("_meta")
        if not isinstance(name, str):
            return False
        own = self._relay_tools.find(name)
        if own is not None and (own.streams or (own.logs and wants_logs(meta))):
            return True
        return isinstance(meta, dict) and META_PROGRESS_TOKEN in meta and self._samples(name, own)

    def waits(self, params: Mapping[str, Any]) -> bool:
        """Return whether a call with ``params`` is of a tool of the relay's own that waits."""
        name = params.get("name")
        own = self._relay_tools.find(name) if isinstance(name, str) else None
        return own is not None and own.waits

    def _samples(self, name: str, own: RelayTool | None) -> bool:
        """Return whether a call of ``name`` starts telemetry, which a progress token follows."""
        if own is not None:
            return own.follows
        parsed = parse(name)
        tool = self._fleet.announced(parsed.canonical) if parsed is not None else None
        return tool is not None and tool.surface.verb.streams

    def charge(self, principal: Principal, cost: float) -> None:
        """Charge work that is no call, or a part of one, to the agent's rate as ``cost`` calls.

        However many calls of the agent are in flight: a tool may charge while its own is one of them.

        Raises:
            ToolError: RATE_LIMITED, with ``retry_after_ms``; INTERNAL while revocations cannot be read.
        """
        try:
            self._check_revocations()
            self._agents.charge(principal.name, self._per_agent, min(cost, self._per_agent.burst))
        except ToolError as error:
            self._count_refusal(principal, error)
            raise

    def revoke(self, jtis: Collection[str]) -> None:
        """End the calls in flight that were made with one of these tokens: E_SAFETY_DENIED."""
        self._executor.revoke(jtis)

    async def _run(self, request: CallRequest, record: CallRecord) -> CallAnswer:
        principal = self._checked_principal(request, record)
        share = record.share = self._enter(principal, record)
        try:
            tool = self._decided(request, principal, record)
            key = request.call.idempotency_key
            waits = isinstance(tool, RelayTool) and tool.waits
            # A poll may be made twice, and must end with its caller: its key buys nothing.
            if isinstance(key, str) and not (waits and tool.idempotent):
                return await self._idempotent_calls.run(key, tool, principal, record, share)
            if waits:
                record.release_share()
            return await self._executor.run(tool, record)
        finally:
            record.release_share()

    def _checked_principal(self, request: CallRequest, record: CallRecord) -> Principal:
        principal = request.caller.principal
        try:
            self._authenticator.check(principal)
        except TokenError:
            # The guard accepted it when the request arrived: it has expired or was revoked since.
            denied = ToolError(Failure.TOKEN_REFUSED)
            record.denied(self._audit, denied)
            raise denied from None
        record.principal = principal
        return principal

    def _enter(self, principal: Principal, record: CallRecord) -> Limiter:
        """Count the call towards its agent's limits."""
        try:
            self._check_revocations()
            return self._agents.acquire(principal.name, self._per_agent)
        except ToolError as error:
            record.counted = True
            self._count_refusal(principal, error)
            raise

    def _count_refusal(self, principal: Principal, error: ToolError) -> None:
        """Count a refusal by the agent's limits: each is not recorded."""
        who = f"{principal.tenant}/{principal.sub}"
        self._refusals.count(RefusalEvent.CALL_REFUSED, who, error.failure.value.code)

    def _check_revocations(self) -> None:
        if not self._revocations_known():
            # The token or the node may have been revoked since.
            text = "The relay cannot read what has been revoked, so it does nothing."
            raise ToolError(Failure.INTERNAL, text)

    def _decided(self, request: CallRequest, principal: Principal, record: CallRecord) -> Tool | RelayTool:
        try:
            self._envelopes.check(request.call, record.correlation_id)
            record.tool = self._decide(request, principal, record)
        except ToolError as error:
            record.denied(self._audit, error)
            raise
        return record.tool

    def _decide(self, request: CallRequest, principal: Principal, record: CallRecord) -> Tool | RelayTool:
        call = request.call
        if not isinstance(call.name, str) or call.message.get("id") is None:
            # In every mode: without a name there is no tool, and without an id no answer is expected.
            raise ToolError(Failure.ENVELOPE_INVALID)
        if call.given_id == "":
            # In every mode: replaced, it would be missing where the caller looks for it.
            raise ToolError(Failure.ENVELOPE_INVALID, _MALFORMED_ID, fix=_FORM_OF_ID)
        own = self._relay_tools.find(call.name)
        if own is not None:
            _check(own, call, principal)
            directed = own.directed(principal.rights, request.selection, call.arguments)
            if directed is None:
                return own
            record.directed = directed
            call = record.call = call.directed(directed.canonical, directed.arguments)
        self._fleet.selected.check(request.selection, call.parsed, principal.tenant)
        tool = self._fleet.resolve(call.name, principal.rights)
        try:
            tool.surface.arguments.check(call.arguments)
        except ViolationError as violation:
            raise ToolError.from_violation(violation) from None
        if tool.surface.verb.streams:
            self._streams.admit(principal, tool)
        return tool

    def _account(self, request: CallRequest, record: CallRecord, answer: CallAnswer | None) -> None:
        """Count the call, and write its line; without an answer its caller has disconnected."""
        duration_s = self._monotonic() - record.started
        failed = record.error.failure.value.code if record.error else "ok"
        outcome = failed if answer else "cancelled"
        self._metrics.calls(outcome, "" if outcome == "ok" else record.hop.value).inc()
        if not record.streamed:
            self._metrics.call_seconds.observe(duration_s)
        self._access_log.write(request, record, answer, duration_s, self._now_ms())
        if (span := span_of(record, outcome, duration_s)) is not None:
            self._spans(span)


def _check(tool: RelayTool, call: Call, principal: Principal) -> None:
    if not tool.visible(principal.rights):
        raise ToolError(Failure.SAFETY_DENIED)
    try:
        tool.schemas.arguments.check(call.arguments)
    except ViolationError as violation:
        raise ToolError.from_violation(violation) from None
