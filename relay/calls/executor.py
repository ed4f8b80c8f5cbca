"""Executes a call that is allowed: record the decision, dispatch, await, check, record the outcome.

Revoking the token that a call in flight was made with ends it. Must not decide who may call.
"""

import asyncio
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from types import TracebackType
from typing import Any

from attrs import define, field
from structlog.typing import FilteringBoundLogger

from relay.ascii_json import encoded
from relay.audit.log import AuditLog, AuditUnavailableError
from relay.calls.call_record import CallAnswer, CallRecord, Hop, SampleStreams, StreamCall, hop_of
from relay.calls.envelope import wants_logs
from relay.calls.relay_tools import RelayTool, RelayToolCall
from relay.calls.results import LABELS, checked, shown
from relay.fleet.tools import Tool
from relay.routing.port import Command, NodeRouter
from schemas.delivery import CALL_BUDGET_MS
from schemas.errors import Failure, ToolError
from schemas.payloads import CmdAck

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

    def under(self, jti: str) -> "RevocableCall":
        """Return the context of one call that was made with the token ``jti``.

        If the token is revoked meanwhile, it raises TOKEN_REFUSED in place of any result.
        """
        return RevocableCall(jti, self)

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
        """Add ``call``, which begins.

        Raises:
            ToolError: TOKEN_REFUSED, if its token was revoked since the call was allowed.
        """
        if call.jti in self._revoked:
            raise ToolError(Failure.TOKEN_REFUSED, "The token was revoked.")
        self._calls.add(call)
        self._none_left.clear()

    def leave(self, call: "RevocableCall") -> None:
        self._calls.discard(call)
        if not self._calls:
            self._none_left.set()


class RevocableCall:
    """The context of one call. Works as ``asyncio.timeout`` does: by cancelling the task that it is in."""

    def __init__(self, jti: str, calls: InFlight) -> None:
        self.jti = jti
        self._calls = calls
        self._task: asyncio.Task[object] | None = None
        self._cancelling = 0
        self._reason: tuple[Failure, str] | None = None

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


ResultListener = Callable[[Tool, Mapping[str, Any]], None]
"""Takes in the result of a call of a node's tool. Must not block, nor raise."""


@define(eq=False, repr=False)
class CallExecutor:
    """Makes calls over ``router``, and starts ``streams``. ``monotonic`` is in seconds."""

    _router: NodeRouter
    _streams: SampleStreams
    _audit: AuditLog
    _monotonic: Callable[[], float]
    _random_bytes: Callable[[int], bytes]
    _log: FilteringBoundLogger
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
        return self._in_flight.under(record.principal.jti if record.principal else "")

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
            ToolError: it failed; ``record.answered`` is whether the node has answered.
            AuditUnavailableError: it was not made, because it cannot be recorded.
        """
        with self.recorded(record):
            if isinstance(tool, RelayTool):
                return await self._answered_here(tool, record)
            async with self.in_flight(record):
                answer = await self._dispatched(tool, record)
            first = checked(answer, tool, record.call.arguments)
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
            record.hop = hop_of(error)
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
        """Return the answer of a tool of the relay's own.

        Raises:
            ToolError: it failed, or has taken longer than its timeout.
        """
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
                result = await tool.answer(call)
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

    def recorded(self, record: CallRecord) -> AbstractContextManager[None]:
        """Return the context of a call that is made, which records the decision and the outcome.

        A canary has no lines of its own: what sends them records them by the minute.
        """
        if record.is_canary:
            return nullcontext()
        return RecordedCall(record, self._audit, self._monotonic, self._log)

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


class RecordedCall:
    """The context of one call that is made: recorded before it begins, and after it has ended."""

    def __init__(
        self,
        record: CallRecord,
        audit: AuditLog,
        monotonic: Callable[[], float],
        log: FilteringBoundLogger,
    ) -> None:
        self._record = record
        self._audit = audit
        self._monotonic = monotonic
        self._log = log

    def __enter__(self) -> None:
        """Record that the call is made.

        Raises:
            AuditUnavailableError: it cannot be recorded; the block has not begun.
        """
        self._record.allowed(self._audit)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._record.ended(self._audit, _code_of(error), self._monotonic())
        except AuditUnavailableError as failed:
            # It has run, so the caller gets the real result. The next call is refused.
            reason, correlation_id = str(failed), self._record.correlation_id
            self._log.error("outcome not recorded", reason=reason, correlation_id=correlation_id)


def _code_of(error: BaseException | None) -> str:
    match error:
        case None:
            return "ok"
        case ToolError():
            return error.failure.value.code
        case Exception():
            return Failure.INTERNAL.value.code
        case _:
            return "cancelled"
