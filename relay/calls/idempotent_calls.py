"""Makes a call once under its idempotency key, and answers those that repeat it.

Must not decide who may call: a key counts only for a caller who may.
"""

import asyncio
import json
from hashlib import sha256

from structlog.typing import FilteringBoundLogger

from relay.audit.log import AuditLog, AuditUnavailableError
from relay.auth.agent_tokens import Principal
from relay.calls.call_record import CallAnswer, CallRecord
from relay.calls.executor import CallExecutor
from relay.calls.idempotency_store import IdempotencyStore, Key, KeyedCall
from relay.fleet.tools import Tool
from relay.rate_limits import Limiter
from schemas.canonical import jcs
from schemas.errors import Failure, ToolError

# After these it is certain that the command has not run: ``NodeRouter`` says so of the one, and the limits of
# the capability or of the node of the other. After any other failure without the node's answer it may have.
_HAS_NOT_RUN = frozenset({Failure.NODE_OFFLINE, Failure.RATE_LIMITED})
_UNKNOWN = "The first call under this key may have run; nobody knows."


class IdempotentCalls:
    """The calls that carry a key."""

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
        self, key: str, tool: Tool, principal: Principal, record: CallRecord, share: Limiter
    ) -> CallAnswer:
        """Make the call, or join the one that is under way, or answer with what became of it.

        A call that is made keeps a place in the agent's ``share`` of its own, until it is over.

        Raises:
            ToolError, AuditUnavailableError: as ``CallExecutor.run``; ENVELOPE_INVALID if the key stands for
                other arguments; RATE_LIMITED if there is no room for another key.
        """
        # Hashed, for where the form of calls is not enforced a key may be of any length.
        hashed_key = sha256(key.encode("utf-8", "surrogatepass")).hexdigest()
        place: Key = (principal.name, tool.canonical, hashed_key)
        arguments = sha256(jcs(record.call.arguments)).hexdigest()
        try:
            keyed = self._store.open(place, arguments, record.correlation_id)
        except ToolError as error:
            record.denied(self._audit, error)
            raise
        if not _is_to_be_sent(keyed, tool):
            return await self._repeated(keyed, tool, record)
        keyed.attempts += 1
        record.attempt = keyed.attempts
        keyed.running = asyncio.create_task(self._sent(place, keyed, tool, record))
        self._running.add(keyed.running)
        keyed.running.add_done_callback(self._ended)
        share.acquire_extra()
        keyed.running.add_done_callback(lambda _: share.release())
        # A caller who goes away leaves it to whoever repeats the call: that is what the key is for.
        try:
            return await asyncio.shield(keyed.running)
        except asyncio.CancelledError:
            keyed.running.add_done_callback(self._report)
            raise

    async def end(self) -> None:
        """End the calls under way, also those whose caller has gone, while their outcome can be recorded."""
        if running := list(self._running):
            for task in running:
                task.cancel()
            await asyncio.wait(running)

    def _ended(self, task: "asyncio.Task[CallAnswer]") -> None:
        self._running.discard(task)
        if not task.cancelled():
            task.exception()  # looked at: else asyncio reports each failed call whose caller has gone

    def _report(self, task: "asyncio.Task[CallAnswer]") -> None:
        """Log a bug in a call whose caller has gone: for any other call the door does that."""
        error = None if task.cancelled() else task.exception()
        if error is not None and not isinstance(error, ToolError | AuditUnavailableError):
            self._log.error("call failed", exc_info=error)

    async def _sent(
        self, place: Key, keyed: KeyedCall[CallAnswer], tool: Tool, record: CallRecord
    ) -> CallAnswer:
        keyed.unknown = True
        try:
            answer = await self._executor.run(tool, record)
            # The text alone: taken apart it is some three times as large.
            self._store.keep(place, CallAnswer(answer.text), len(answer.text))
        except AuditUnavailableError:
            self._forget(place, keyed)
            raise
        except ToolError as error:
            if error.failure in _HAS_NOT_RUN:
                self._forget(place, keyed)
            elif record.answered and error.failure is not Failure.DEADLINE_EXCEEDED:
                keyed.outcome, keyed.unknown = _afresh(error), False
            raise
        finally:
            keyed.running = None
        keyed.unknown = False
        return answer

    def _forget(self, place: Key, keyed: KeyedCall[CallAnswer]) -> None:
        """Forget a call that was not made, unless it was sent before and may have run then."""
        if keyed.attempts == 1:
            self._store.forget(place)

    async def _repeated(self, keyed: KeyedCall[CallAnswer], tool: Tool, record: CallRecord) -> CallAnswer:
        record.first, record.attempt = keyed.first, keyed.attempts
        with self._executor.recorded(record):
            if keyed.running is not None:
                return await self._joined(keyed.running, tool, record)
            if keyed.outcome is None:
                raise ToolError(Failure.DEADLINE_EXCEEDED, _UNKNOWN)
            if isinstance(keyed.outcome, ToolError):
                raise _afresh(keyed.outcome)
            return CallAnswer(keyed.outcome.text, result=json.loads(keyed.outcome.text))

    async def _joined(
        self, running: "asyncio.Task[CallAnswer]", tool: Tool, record: CallRecord
    ) -> CallAnswer:
        try:
            async with asyncio.timeout(self._executor.budget_ms(tool, record) / 1000):
                async with self._executor.under_way(record):
                    return await _of_another(running)
        except TimeoutError:
            raise ToolError(Failure.DEADLINE_EXCEEDED) from None


async def _of_another(running: "asyncio.Task[CallAnswer]") -> CallAnswer:
    try:
        return await asyncio.shield(running)
    except ToolError as error:
        if error.failure is Failure.SAFETY_DENIED:
            # The token of whoever called first was revoked; whoever joined has another, which is good.
            raise ToolError(Failure.DEADLINE_EXCEEDED, _UNKNOWN) from None
        raise


def _afresh(error: ToolError) -> ToolError:
    """Return the same error without where it was raised: that would keep alive all that was there."""
    return ToolError(error.failure, error.detail, retry_after_ms=error.retry_after_ms)


def _is_to_be_sent(keyed: KeyedCall[CallAnswer], tool: Tool) -> bool:
    if keyed.running is not None or keyed.outcome is not None:
        return False
    return not keyed.unknown or tool.surface.verb.idempotent
