"""The call gateway: every call of every transport passes ``CallGateway.call``.

Identify, limit, read, resolve, authorise, validate, record the decision, dispatch, await, validate the
result, cross-check, record the outcome, answer. No check of a call is made before it. Must not know
transports: they are thin adapters around it.
"""

from collections.abc import Callable, Collection, Mapping
from datetime import UTC, datetime
from typing import Any

from attrs import define, field
from structlog.typing import FilteringBoundLogger

from relay.audit.log import AuditUnavailableError
from relay.audit.refusal_counts import RefusalCounter, RefusalEvent
from relay.audit.writer import AuditWriter
from relay.auth.agent_tokens import AgentName, Authenticator, Caller, Principal
from relay.calls.access_log import AccessLog, span_of
from relay.calls.envelope import Call, EnvelopeCheck, wants_logs
from relay.calls.executor import CallExecutor, CallRecord, CallRequest, SampleStreams
from relay.calls.idempotency import IdempotentCalls
from relay.calls.relay_tools import DirectedCall, RelayTool, RelayTools
from relay.calls.results import CallAnswer
from relay.fleet.fleet import Fleet
from relay.fleet.tools import Tool
from relay.fleet.usability import OFFLINE_FIX
from relay.limits.rate_limits import Allowance, KeyedLimiters, Limiter
from relay.observability.ascii_json import encoded
from relay.observability.metrics import Metrics
from relay.settings.config import EnvelopeMode
from schemas.errors import Failure, ToolError, to_jsonrpc_error
from schemas.projection import META_PROGRESS_TOKEN
from schemas.registry import Validator
from schemas.spans import SpanSink, no_spans
from schemas.times import SystemClock
from schemas.tokens import TokenError
from schemas.ulids import UlidSource
from schemas.violations import ViolationError

_FIRST_RETRY_MS, _LAST_RETRY_MS = 1_000, 30_000
"""A node waits between its attempts to connect for about as long as it has been away, up to the second."""
_MALFORMED_ID = "The correlation id of the call is malformed."
_FORM_OF_ID = "Send 1 to 64 letters, digits and ._- in _meta or the header X-Correlation-Id, or no id."


def explained(error: ToolError, since_ms: int | None, now_ms: int) -> ToolError:
    """Return ``error``, which is NODE_OFFLINE, with what is known of the node's absence.

    ``since_ms`` is when its connection was lost; None if it was not connected since this relay started.
    """
    if since_ms is None:
        text, away_ms = "The node is not connected, and was not since this relay was started", _LAST_RETRY_MS
    else:
        away_ms = max(0, now_ms - since_ms)
        at = datetime.fromtimestamp(since_ms / 1000, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
        text = f"The node is not connected since {at}, {away_ms // 1000} s ago"
    return ToolError(
        error.failure,
        f"{text}; the command was never sent.",
        fix=OFFLINE_FIX,
        retry_after_ms=min(max(away_ms, _FIRST_RETRY_MS), _LAST_RETRY_MS),
    )


@define(eq=False, repr=False, kw_only=True)
class CallGateway:
    """Decides, dispatches and records calls."""

    _authenticator: Authenticator
    _envelopes: EnvelopeCheck
    _fleet: Fleet
    _relay_tools: RelayTools
    _streams: SampleStreams
    _executor: CallExecutor
    _idempotent_calls: IdempotentCalls
    _audit: AuditWriter
    _refusals: RefusalCounter
    _metrics: Metrics
    _access_log: AccessLog
    _ulids: UlidSource
    _per_agent: Allowance
    _revocations_known: Callable[[], bool]
    _now_ms: SystemClock
    _monotonic: Callable[[], float]
    _log: FilteringBoundLogger
    _spans: SpanSink = no_spans
    _agents: KeyedLimiters[AgentName] = field(init=False)

    def __attrs_post_init__(self) -> None:
        self._agents = KeyedLimiters(self._monotonic)

    def change(self, per_agent: Allowance, mode: EnvelopeMode) -> None:
        """Apply other limits of an agent, and another check of envelopes, to the calls from now on."""
        self._per_agent = per_agent
        self._envelopes.mode = mode

    def refusal_of(
        self, caller: Caller, message: Mapping[str, Any], *, is_request: bool, requires_params: bool
    ) -> dict[str, Any] | None:
        """Return the JSON-RPC error for a message whose required members are malformed; None for another.

        A refusal is charged as a call, and has its line in the access log. It has none in the audit: it
        decides nothing.

        Raises:
            ToolError: as of ``charge``.
        """
        try:
            self._envelopes.check_required(message, is_request=is_request, requires_params=requires_params)
        except ToolError as error:
            self.charge(caller.principal, 1)
            request = CallRequest(caller, Call(message, caller.traceparent, caller.correlation_id))
            record = CallRecord(self._ulids.new(), request.call, self._monotonic(), request)
            record.principal, record.error = caller.principal, error
            refusal = to_jsonrpc_error(error.failure.value.canonical.name, error.detail)
            self._access_log.write(request, record, CallAnswer(encoded(refusal)), 0.0, self._now_ms())
            return refusal
        return None

    async def call(self, request: CallRequest) -> CallAnswer:
        """Answer ``request``. Raises only when cancelled: every failure is an error envelope."""
        record = CallRecord(self._ulids.new(), request.call, self._monotonic(), request)
        answer: CallAnswer | None = None
        try:
            answer = await self._answered(request, record)
            tool = record.tool
            # Not by ``_replace``, which takes four times as long.
            return CallAnswer(
                answer.text,
                answer.result,
                answer.error,
                answer.hop,
                record.correlation_id,
                answer.images,
                tool.untrusted if tool is not None else (),
                tool.asks if tool is not None else (),
            )
        finally:
            self._account(request, record, answer)

    async def _answered(self, request: CallRequest, record: CallRecord) -> CallAnswer:
        try:
            return await self._run(request, record)
        except ToolError as error:
            # Of a call that is followed after its answer the node may go away: that was sent.
            is_away = error.failure is Failure.NODE_OFFLINE and not record.answered
            # Its traceback refers to the record: both would wait for the garbage collector.
            record.error = (self._with_absence(error, record) if is_away else error).with_traceback(None)
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

    def streams(self, call: Call) -> bool:
        """Return whether ``call`` may send notifications before its result."""
        own = self._own(call)
        if own is not None and (own.streams or (own.logs and wants_logs(call.meta))):
            return True
        if META_PROGRESS_TOKEN not in call.meta:
            return False
        if own is not None:
            return own.follows
        tool = self._fleet.tool_of(call.parsed.canonical) if call.parsed is not None else None
        return tool is not None and tool.surface.verb.streams

    def waits(self, call: Call) -> bool:
        own = self._own(call)
        return own is not None and own.waits

    def _own(self, call: Call) -> RelayTool | None:
        return self._relay_tools.find(call.name) if isinstance(call.name, str) else None

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
        self._executor.revoke(jtis)

    async def _run(self, request: CallRequest, record: CallRecord) -> CallAnswer:
        principal = request.caller.principal
        try:
            self._authenticator.check(principal)
        except TokenError:
            # The guard accepted it when the request arrived: it has expired or was revoked since.
            denied = ToolError(Failure.TOKEN_REFUSED)
            await self._audit.record(record.denied(denied))
            raise denied from None
        record.principal = principal
        share = record.share = self._enter(principal, record)
        try:
            tool = await self._decided(request, principal, record)
            key = request.call.idempotency_key
            waits = isinstance(tool, RelayTool) and tool.waits
            # A poll may be made twice, and must end with its caller: its key buys nothing.
            if isinstance(key, str) and not (waits and tool.idempotent):
                return await self._idempotent_calls.run(
                    key, tool, principal, request.selection, record, share
                )
            if waits:
                record.release_share()
            return await self._executor.run(tool, record)
        finally:
            record.release_share()

    def _enter(self, principal: Principal, record: CallRecord) -> Limiter:
        try:
            self._check_revocations()
            return self._agents.acquire(principal.name, self._per_agent)
        except ToolError as error:
            record.counted = True
            self._count_refusal(principal, error)
            raise

    def _count_refusal(self, principal: Principal, error: ToolError) -> None:
        who = f"{principal.tenant}/{principal.sub}"
        self._refusals.count(RefusalEvent.CALL_REFUSED, who, error.failure.value.code)

    def _check_revocations(self) -> None:
        if not self._revocations_known():
            # The token or the node may have been revoked since.
            text = "The relay cannot read what has been revoked, so it does nothing."
            raise ToolError(Failure.INTERNAL, text)

    async def _decided(
        self, request: CallRequest, principal: Principal, record: CallRecord
    ) -> Tool | RelayTool:
        try:
            if request.parent is None:  # a part has no message of its own: the whole was one
                self._envelopes.check(request.call, record.correlation_id)
            record.tool = self._decide(request, principal, record)
        except ToolError as error:
            await self._audit.record(record.denied(error))
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
            directed = _directed(own, request, principal)
            if directed is None:
                return own
            record.directed = directed
            call = record.call = call.directed(directed.tool, directed.arguments)
        self._fleet.selected.check(request.selection, call.parsed, principal.rights)
        if call.parsed is None:
            raise ToolError(Failure.NAME_UNKNOWN)
        tool = self._fleet.resolve(call.parsed.canonical, principal.rights)
        _check(tool.surface.arguments, call)
        if tool.surface.verb.streams:
            self._streams.admit(principal, tool, followed=record.following() is not None)
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


def _directed(tool: RelayTool, request: CallRequest, principal: Principal) -> DirectedCall | None:
    """Return the call of a node's tool that one of the relay's ``tool`` is; None if the relay answers."""
    if not tool.visible(principal.rights):
        raise ToolError(Failure.SAFETY_DENIED)
    if request.parent is not None:
        return request.parent.directed(principal.rights)
    _check(tool.schemas.arguments, request.call)
    return tool.directed(principal.rights, request.selection, request.call.arguments)


def _check(arguments: Validator, call: Call) -> None:
    try:
        arguments.check(call.arguments)
    except ViolationError as violation:
        raise ToolError.from_violation(violation) from None
