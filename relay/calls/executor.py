"""One call: what is known of it, and its execution once it is allowed.

Record the decision, dispatch, await, check, record the outcome. Revoking the token that a call in flight was
made with ends it. What is made for every call is a tuple, or has slots: a frozen dataclass takes twice as
long. Must not decide who may call, nor know streams: ``relay.streams`` implements ``SampleStreams``.
"""

import asyncio
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractAsyncContextManager, nullcontext, suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Any, NamedTuple, Protocol

from attrs import define, field

from relay.audit.writer import AuditWriter
from relay.auth.agent_tokens import Caller, Principal
from relay.auth.permissions import Rights
from relay.calls.envelope import Call, follow_s, wants_logs
from relay.calls.relay_tools import DirectedCall, Emit, ParentCall, RelayTool, RelayToolCall
from relay.calls.results import LABELS, CallAnswer, Hop, checked, shown
from relay.fleet.selection import WHOLE_FLEET, Selection
from relay.fleet.tools import Tool
from relay.limits.rate_limits import Limiter
from relay.observability.ascii_json import encoded, members_of
from relay.routing.port import Command, Idempotency, NodeRouter
from schemas.delivery import CALL_BUDGET_MS
from schemas.errors import Failure, ToolError
from schemas.payloads import CmdAck
from schemas.projection import META_PROGRESS_TOKEN
from schemas.text import printable

_NO_PRINCIPAL = members_of({"tenant": None, "iss": None, "sub": None, "jti": None})


class CallRequest(NamedTuple):
    """A call from a transport: its caller is identified, and nothing else of it has been checked.

    Attributes:
        emit: sends a notification before the answer; None where that cannot be a stream.
        selection: what the caller's URL narrows the fleet to.
        parent: the call whose answer this one is a part of, if any.
    """

    caller: Caller
    call: Call
    emit: Emit | None = None
    selection: Selection = WHOLE_FLEET
    parent: ParentCall | None = None


MOST_SAMPLES = 10
FOLLOWED_S = 15.0
"""Clients send a progress token with every call, and wait for its result: so it comes soon."""


@dataclass(frozen=True, slots=True)
class Following:
    """How the caller of a call follows it: by notifications with its progress token.

    Attributes:
        most: after how many samples the call ends; None if it lasts ``for_s`` in any case.
        for_s: after how many seconds it ends.
    """

    emit: Emit
    progress_token: str | int
    most: int | None = MOST_SAMPLES
    for_s: float = FOLLOWED_S


@dataclass(slots=True)
class CallRecord:
    """What is known of one call, and its lines in the audit.

    Attributes:
        started: when it arrived, on the gateway's monotonic clock.
        call: as it was received, or as the call of the node's tool that it was directed to.
        request: what it was made of; a tool of the relay's own is given its caller.
        first: the correlation id of the call that this one repeats; None if it repeats none.
        attempt: how often the call was sent under its idempotency key, this one included.
        idempotency: its key, as a relay that holds its node's session needs to know it; None without a key.
        share: what the call takes of its agent's concurrency, until it is released.
        streamed: whether it stays open after its first sample: then it is no measure of latency.
        answered: whether the node has answered, so that the outcome is known.
        hop: where the call is; of one that failed, the hop that failed.
        is_canary: whether the relay makes it by itself: it uses up nothing of the capability's rate, and
            has no lines of its own in the audit.
        counted: whether its agent's limits refused it, so that the audit counts it with others.
        error: what it failed with.
        directed: what a tool of the relay's own has directed the call to, if one has.
    """

    correlation_id: str
    call: Call
    started: float
    request: CallRequest | None = None
    principal: Principal | None = None
    tool: Tool | RelayTool | None = None
    first: str | None = None
    attempt: int = 1
    idempotency: Idempotency | None = None
    span_id: str | None = None
    share: Limiter | None = None
    streamed: bool = False
    answered: bool = False
    hop: Hop = Hop.RELAY
    is_canary: bool = False
    counted: bool = False
    error: ToolError | None = None
    directed: DirectedCall | None = None

    @property
    def rights(self) -> Rights | None:
        """What its caller may use; None if it has no caller."""
        return self.principal.rights if self.principal is not None else None

    def release_share(self) -> None:
        share, self.share = self.share, None
        if share is not None:
            share.release()

    def following(self) -> Following | None:
        """Return how what the call streams is followed; None if it is not."""
        by_caller = self._followed_by_caller()
        if self.directed is None or self.directed.for_s is None:
            return by_caller
        samples = self.directed.samples

        async def gather(method: str, params: Mapping[str, Any]) -> None:
            samples.append(params["message"])
            if by_caller is not None:
                await by_caller.emit(method, params)

        return Following(gather, by_caller.progress_token if by_caller else "", None, self.directed.for_s)

    def shown(self, answer: CallAnswer) -> CallAnswer:
        """Return the node's ``answer`` as the caller of the tool that was called gets it."""
        if self.directed is None or answer.result is None:
            return answer
        result = self.directed.shown(answer.result, self.directed.samples)
        return CallAnswer(encoded(result), result=result, images=answer.images)

    def _followed_by_caller(self) -> Following | None:
        emit = self.request.emit if self.request is not None else None
        token = self.call.meta.get(META_PROGRESS_TOKEN)
        # A keyed call outlives its caller, and so its stream.
        if emit is None or self.call.idempotency_key is not None or isinstance(token, bool):
            return None
        if not isinstance(token, int | str):
            return None
        for_s = follow_s(self.call.meta)
        return Following(emit, token) if for_s is None else Following(emit, token, None, for_s)

    def denied(self, error: ToolError) -> str:
        """Return the members of the line that denies the call."""
        return f'{self._members()},"decision":"deny","code":"{error.failure.value.code}"'

    def allowed(self) -> str:
        """Return the members of the line that allows the call."""
        return self._members() + ',"decision":"allow","code":"ok"'

    def ended(self, error: BaseException | None, now: float) -> str:
        """Return the members of the line with the outcome of a call that was allowed."""
        duration_ms = int((now - self.started) * 1e6 + 0.5) / 1000  # ``round`` takes ten times as long
        outcome, code = _outcome_of(error)
        return f'{self._members()},"outcome":"{outcome}","code":"{code}","duration_ms":{duration_ms}'

    def _members(self) -> str:
        who = self.principal.members if self.principal else _NO_PRINCIPAL
        members = f'"correlation_id":"{self.correlation_id}",{who},{self._called()}'
        if self.call.given_id:
            members = f'{members},"caller_correlation_id":"{self.call.given_id}"'
        if self.request is not None and self.request.parent is not None:
            members = f'{members},"parent":"{self.request.parent.correlation_id}"'
        return members if self.first is None else f'{members},"first":"{self.first}"'

    def _called(self) -> str:
        if isinstance(self.tool, Tool):
            # Of the name's alphabet and a node's: no character of theirs needs an escape.
            return f'"tool":"{self.tool.canonical}","node_id":"{self.tool.node_id}"'
        if self.tool is not None:
            return members_of({"tool": self.tool.canonical, "node_id": self.tool.node_id})
        name, parsed = self.call.name, self.call.parsed
        shown = printable(name, 64) if isinstance(name, str) else ""
        return members_of({"tool": shown, "node_id": parsed.node_id if parsed else None})


@dataclass(frozen=True, slots=True)
class StreamCall:
    """A call that is allowed, and has been answered by its first sample.

    Attributes:
        following: None if the call ends with its first sample, and is followed by its resource.
    """

    principal: Principal
    tool: Tool
    arguments: Mapping[str, Any]
    following: Following | None


class SampleStreams(Protocol):
    """The streams that calls start."""

    def admit(self, principal: Principal, tool: Tool, *, followed: bool) -> None:
        """Return if another stream may be started; one that is ``followed`` replaces no other of its agent.

        Raises:
            ToolError: RATE_LIMITED.
        """

    async def start(self, call: StreamCall, first: CallAnswer) -> CallAnswer:
        """Start the stream, and return the answer of the call: at once, or when it is no longer followed.

        Raises:
            ToolError: the stream ended while it was followed; RATE_LIMITED: others were started meanwhile.
        """


_ENDING_S = 1.0
_REVOKED = (Failure.TOKEN_REFUSED, "The token was revoked during the call.")
_STOPPED = (Failure.DEADLINE_EXCEEDED, "The relay was stopped during the call, which may have run.")


@define(eq=False, repr=False)
class InFlight:
    """Every call in flight."""

    _calls: "set[RevocableCall]" = field(init=False, factory=set)
    _revoked: frozenset[str] = field(init=False, default=frozenset())
    _none_left: asyncio.Event = field(init=False, factory=asyncio.Event)

    def __attrs_post_init__(self) -> None:
        self._none_left.set()

    def revoke(self, jtis: Collection[str]) -> None:
        """End every call that was made with one of ``jtis``, which are all revoked tokens."""
        self._revoked = frozenset(jtis)
        for call in self._calls:
            if call.jti in self._revoked:
                call.end(_REVOKED)

    async def drain(self, timeout_s: float) -> None:
        """Wait until no call is in flight; end those that last longer than ``timeout_s``."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._none_left.wait()
        for call in self._calls:
            call.end(_STOPPED)
        with suppress(TimeoutError):
            async with asyncio.timeout(_ENDING_S):
                await self._none_left.wait()

    def enter(self, call: "RevocableCall") -> None:
        """Add a call. Raises TOKEN_REFUSED if its token was revoked since it was allowed."""
        if call.jti in self._revoked:
            raise ToolError(Failure.TOKEN_REFUSED, "The token was revoked.")
        self._calls.add(call)
        self._none_left.clear()

    def leave(self, call: "RevocableCall") -> None:
        self._calls.discard(call)
        if not self._calls:
            self._none_left.set()


@define(eq=False, repr=False)
class RevocableCall:
    """The context of one call under ``jti``: TOKEN_REFUSED if that token is revoked meanwhile.

    Works as ``asyncio.timeout`` does: by cancelling the task that it is in.
    """

    jti: str
    _calls: InFlight
    _task: asyncio.Task[object] | None = field(init=False, default=None)
    _cancelling: int = field(init=False, default=0)
    _reason: tuple[Failure, str] | None = field(init=False, default=None)

    def is_stopped(self) -> bool:
        """Return whether it is ended here, and not by its caller."""
        return self._reason is not None

    def end(self, reason: tuple[Failure, str]) -> None:
        if self._task is not None and self._reason is None:
            self._reason = reason
            self._task.cancel()

    async def __aenter__(self) -> None:
        self._task = asyncio.current_task()
        self._cancelling = self._task.cancelling() if self._task is not None else 0
        self._calls.enter(self)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._calls.leave(self)
        if self._reason is None or self._task is None:
            return
        if kind is None or not issubclass(kind, asyncio.CancelledError):
            # It ended at the same time: the cancellation is still pending, and must not hit other code.
            with suppress(asyncio.CancelledError):
                await asyncio.sleep(0)
        if self._task.uncancel() > self._cancelling:
            raise asyncio.CancelledError from error  # its caller has cancelled it too
        raise ToolError(*self._reason) from None


_SPAN_BYTES = 8
_MAY_HAVE_RUN = frozenset({Failure.DEADLINE_EXCEEDED, Failure.INTERNAL, Failure.NODE_OFFLINE})
"""A tool of the relay's own that refuses by another failure has done nothing."""
_HOPS = {
    Failure.NODE_OFFLINE: Hop.SESSION,
    Failure.ATTESTATION_FAILED: Hop.SESSION,
    Failure.DEADLINE_EXCEEDED: Hop.NODE,
}

ResultListener = Callable[[Tool, Mapping[str, Any]], None]
"""Handles the result of a call of a node's tool. Must not block, nor raise."""


@define(eq=False, repr=False)
class CallExecutor:
    """Makes calls over ``router``, and starts ``streams``. ``monotonic`` is in seconds."""

    _router: NodeRouter
    _streams: SampleStreams
    _audit: AuditWriter
    _monotonic: Callable[[], float]
    _random_bytes: Callable[[int], bytes]
    _in_flight: InFlight = field(init=False, factory=InFlight)
    _listeners: list[ResultListener] = field(init=False, factory=list)

    def on_result(self, listener: ResultListener) -> None:
        """Call ``listener`` with the result of every call of a node's tool, after it was checked."""
        self._listeners.append(listener)

    def revoke(self, jtis: Collection[str]) -> None:
        self._in_flight.revoke(jtis)

    async def drain(self, timeout_s: float) -> None:
        """Wait for the calls in flight; those that last longer end with DEADLINE_EXCEEDED."""
        await self._in_flight.drain(timeout_s)

    def in_flight(self, record: CallRecord) -> RevocableCall:
        """Return the context of a call in flight, which ends when its token is revoked."""
        return RevocableCall(record.principal.jti if record.principal else "", self._in_flight)

    def budget_ms(self, tool: Tool | RelayTool, record: CallRecord) -> int:
        """Return how much time is left for the call (RFC-0005 section 7, DESIGN section 8)."""
        now = self._monotonic()
        spent_ms = int((now - record.started) * 1000)
        if isinstance(tool, RelayTool):
            return max(1, int(tool.timeout_s * 1000) - spent_ms)
        parent = record.request.parent if record.request is not None else None
        left_ms = CALL_BUDGET_MS - spent_ms if parent is None else int((parent.ends - now) * 1000)
        return max(1, left_ms)

    async def run(self, tool: Tool | RelayTool, record: CallRecord) -> CallAnswer:
        """Make the call of ``record``, which is to ``tool``.

        Raises:
            ToolError: it failed; ``record.answered`` is whether the node, or a tool of the relay's own, has
                answered.
            AuditUnavailableError: it was not made, because it cannot be recorded.
        """
        async with self.recorded(record):
            if isinstance(tool, RelayTool):
                return await self._answered_here(tool, record)
            async with self.in_flight(record):
                answer = await self._dispatched(tool, record)
            first = checked(answer, tool, record.call.arguments, record.rights)
            record.hop = Hop.RELAY
            for listener in self._listeners:
                listener(tool, first.result or {})
            if not tool.surface.verb.streams or record.principal is None:
                return record.shown(first)
            call = StreamCall(record.principal, tool, record.call.arguments, record.following())
            return record.shown(await self._streamed(call, first, record))

    async def _dispatched(self, tool: Tool, record: CallRecord) -> CmdAck:
        """Return the node's answer, and note in ``record`` how far the call came."""
        try:
            answer = await self._router.run(self._command(tool, record))
        except BaseException as error:
            failure = error.failure if isinstance(error, ToolError) else None
            record.hop = Hop.RELAY if failure is None else _HOPS.get(failure, Hop.RELAY)
            raise
        record.answered, record.hop = True, Hop.NODE
        return answer

    async def _streamed(self, call: StreamCall, first: CallAnswer, record: CallRecord) -> CallAnswer:
        """Start the stream, and return the answer when the caller no longer follows it by this call."""
        if call.following is not None:
            # An open stream has a limit of its own, and must not use up what its agent may call at once.
            record.streamed = True
            record.release_share()
        async with self.in_flight(record):
            return await self._streams.start(call, first)

    async def _answered_here(self, tool: RelayTool, record: CallRecord) -> CallAnswer:
        """Return the answer of a tool of the relay's own, which may take as long as its timeout."""
        request = record.request
        if request is None:
            raise ToolError(Failure.INTERNAL)
        # A keyed call outlives its caller, and so its stream.
        emit = request.emit if record.call.idempotency_key is None else None
        log_emit = emit if wants_logs(record.call.meta) else None
        in_flight = self.in_flight(record)
        call = RelayToolCall(
            caller=request.caller,
            call=record.call,
            emit=emit,
            log_emit=log_emit,
            selection=request.selection,
            correlation_id=record.correlation_id,
            ends=record.started + tool.timeout_s,
            is_stopped=in_flight.is_stopped,
        )
        try:
            async with (
                in_flight,
                asyncio.timeout(self.budget_ms(tool, record) / 1000) as timeout,
            ):
                result = await _answered(tool, call, record)
        except TimeoutError:
            if timeout.expired():
                raise ToolError(Failure.DEADLINE_EXCEEDED) from None
            raise
        record.answered = True
        if not tool.schemas.result.is_valid(result):
            raise ToolError(Failure.RESULT_INVALID)
        if tool.verbatim:
            return CallAnswer(encoded(result), result=result)
        return shown(result, tool.schemas.result, LABELS)

    def recorded(self, record: CallRecord) -> AbstractAsyncContextManager[None]:
        """Return the context of a call that is made, which records the decision and the outcome.

        A canary has no lines of its own: what sends them records them by the minute.
        """
        if record.is_canary:
            return nullcontext()
        return RecordedCall(record, self._audit, self._monotonic)

    def _command(self, tool: Tool, record: CallRecord) -> Command:
        trace = record.call.trace
        if trace is not None:
            record.span_id = self._random_bytes(_SPAN_BYTES).hex()
        return Command(
            node_id=tool.node_id,
            tool=tool.canonical,
            arguments=record.call.arguments,
            deadline_ms=self.budget_ms(tool, record),
            correlation_id=record.correlation_id,
            traceparent=trace.traceparent(record.span_id) if trace and record.span_id else None,
            cost=0.0 if record.is_canary else 1.0,
            idempotency=record.idempotency,
            caller=record.principal.digest if record.principal else None,
        )


@define(eq=False, repr=False)
class RecordedCall:
    """The context of one call that is made: recorded before it begins, and after it has ended."""

    _record: CallRecord
    _audit: AuditWriter
    _monotonic: Callable[[], float]

    async def __aenter__(self) -> None:
        """Record that the call is made. Raises AuditUnavailableError: the block has not begun."""
        await self._audit.record(self._record.allowed(), otherwise=self._ended)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # It has run, so the caller gets the real result, also if this cannot be written.
        self._audit.note(self._ended(error), self._record.correlation_id)

    def _ended(self, error: BaseException | None) -> str:
        return self._record.ended(error, self._monotonic())


async def _answered(tool: RelayTool, call: RelayToolCall, record: CallRecord) -> Mapping[str, Any]:
    try:
        return await tool.answer(call)
    except ToolError as error:
        record.answered = error.failure not in _MAY_HAVE_RUN
        raise


def _outcome_of(error: BaseException | None) -> tuple[str, str]:
    """Return the outcome and the code of a call that ended with ``error``, as the audit has them."""
    match error:
        case None:
            return "ok", "ok"
        case ToolError(failure=Failure.OUTSIDE_CEILING):
            # A token that was revoked meanwhile has the same code, but it is the relay that denies then.
            return "denied_by_owner", error.failure.value.code
        case ToolError():
            return "error", error.failure.value.code
        case Exception():
            return "error", Failure.INTERNAL.value.code
        case _:
            return "error", "cancelled"
