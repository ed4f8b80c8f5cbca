"""Makes a call once for its idempotency key, and answers its repetitions.

Must not decide who may call: that is decided for each repetition before it gets here.
"""

import asyncio
import json
from functools import partial
from hashlib import sha256

from structlog.typing import FilteringBoundLogger

from relay.audit.log import AuditLog, AuditUnavailableError
from relay.auth.agent_tokens import Principal
from relay.calls.call_record import CallAnswer, CallRecord
from relay.calls.executor import CallExecutor
from relay.calls.idempotency_store import OUTCOME_UNKNOWN, CallKey, IdempotencyStore, KeyedCall
from relay.calls.relay_tools import RelayTool
from relay.fleet.tools import Tool
from relay.limits.rate_limits import Limiter
from relay.routing.port import Idempotency
from schemas.canonical import jcs
from schemas.errors import Failure, ToolError


class IdempotentCalls:
    """The calls that carry an idempotency key."""

    def __init__(
        self,
        executor: CallExecutor,
        store: IdempotencyStore[CallAnswer],
        audit: AuditLog,
        log: FilteringBoundLogger,
    ) -> None:
        self._executor = executor
        self._store = store
        self._audit = audit
        self._log = log
        self._running: set[asyncio.Task[CallAnswer]] = set()

    async def run(
        self, key: str, tool: Tool | RelayTool, principal: Principal, record: CallRecord, share: Limiter
    ) -> CallAnswer:
        """Make the call, or join the one in flight, or answer with its outcome.

        A call that is made counts in the agent's ``share`` on its own until it has ended.

        Raises:
            ToolError, AuditUnavailableError: as ``CallExecutor.run``; ENVELOPE_INVALID if the key was used
                for other arguments; RATE_LIMITED if too many keys are in use.
        """
        # Hashed: where the form of calls is not enforced, a key may have any length.
        hashed_key = sha256(key.encode("utf-8", "surrogatepass")).hexdigest()
        key_of_call: CallKey = (principal.name, tool.canonical, hashed_key)
        arguments = sha256(jcs(record.call.arguments)).hexdigest()
        try:
            keyed = self._store.open(
                key_of_call, arguments, record.correlation_id, repeatable=tool.idempotent
            )
        except ToolError as error:
            record.denied(self._audit, error)
            raise
        if not keyed.may_be_sent(repeatable=tool.idempotent):
            return await self._repeated(keyed, tool, record)
        record.idempotency = Idempotency(principal.name, hashed_key, arguments, tool.idempotent)
        running = asyncio.create_task(self._sent(key_of_call, tool, record))
        keyed.begin(running)
        record.attempt = keyed.attempts
        self._running.add(running)
        running.add_done_callback(self._ended)
        share.acquire_extra()
        running.add_done_callback(lambda _: share.release())
        # Shield: when the caller disconnects, the call goes on, and a repetition gets its outcome.
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            running.add_done_callback(partial(self._report, record.correlation_id))
            raise

    async def end(self) -> None:
        """End the calls in flight, also of disconnected callers, while their outcome can be recorded."""
        if running := list(self._running):
            for task in running:
                task.cancel()
            await asyncio.wait(running)

    def _ended(self, task: "asyncio.Task[CallAnswer]") -> None:
        self._running.discard(task)
        if not task.cancelled():
            task.exception()  # retrieved: else asyncio reports each failed call whose caller has disconnected

    def _report(self, correlation_id: str, task: "asyncio.Task[CallAnswer]") -> None:
        """Log a bug in a call whose caller has disconnected: for any other call the gateway does."""
        error = None if task.cancelled() else task.exception()
        if error is not None and not isinstance(error, ToolError | AuditUnavailableError):
            self._log.error("call failed", correlation_id=correlation_id, exc_info=error)

    async def _sent(self, key_of_call: CallKey, tool: Tool | RelayTool, record: CallRecord) -> CallAnswer:
        try:
            answer = await self._executor.run(tool, record)
        except AuditUnavailableError:
            self._store.not_run(key_of_call)
            raise
        except ToolError as error:
            outcome = _without_traceback(error) if record.answered else None
            self._store.ended(key_of_call, error.failure, outcome)
            raise
        # The text alone: parsed, it takes about three times the memory.
        size = len(answer.text) + sum(len(image["data"]) for image in answer.images)
        self._store.ended(key_of_call, None, CallAnswer(answer.text, images=answer.images), size)
        return answer

    async def _repeated(
        self, keyed: KeyedCall[CallAnswer], tool: Tool | RelayTool, record: CallRecord
    ) -> CallAnswer:
        record.first, record.attempt = keyed.first, keyed.attempts
        with self._executor.recorded(record):
            if keyed.running is not None:
                return await self._joined(keyed.running, tool, record)
            if keyed.outcome is None:
                raise ToolError(Failure.DEADLINE_EXCEEDED, OUTCOME_UNKNOWN)
            if isinstance(keyed.outcome, ToolError):
                raise _without_traceback(keyed.outcome)
            text, images = keyed.outcome.text, keyed.outcome.images
            return CallAnswer(text, result=json.loads(text), images=images)

    async def _joined(
        self, running: "asyncio.Task[CallAnswer]", tool: Tool | RelayTool, record: CallRecord
    ) -> CallAnswer:
        try:
            async with asyncio.timeout(self._executor.budget_ms(tool, record) / 1000):
                async with self._executor.in_flight(record):
                    return await _result_of_first(running)
        except TimeoutError:
            raise ToolError(Failure.DEADLINE_EXCEEDED) from None


async def _result_of_first(running: "asyncio.Task[CallAnswer]") -> CallAnswer:
    try:
        return await asyncio.shield(running)
    except ToolError as error:
        if error.failure is Failure.TOKEN_REFUSED:
            # The first caller's token was revoked; the one that joined has another, which is accepted.
            raise ToolError(Failure.DEADLINE_EXCEEDED, OUTCOME_UNKNOWN) from None
        raise


def _without_traceback(error: ToolError) -> ToolError:
    """Return the same error without its traceback, which would keep the frames alive."""
    return ToolError(error.failure, error.detail, fix=error.fix, retry_after_ms=error.retry_after_ms)
