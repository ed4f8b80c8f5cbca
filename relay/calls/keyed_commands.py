"""Sends a command once for its idempotency key, in the relay that holds the node's session.

For a fleet of several relays: a call that is repeated by way of another relay finds here what became of the
first. The relay that a call arrives at keeps its own record beside it (``idempotent_calls``). Must not know
callers beyond their names, nor whether they may call.
"""

import asyncio
import json
from collections.abc import Callable

from relay.ascii_json import encoded
from relay.calls.idempotency_store import (
    OUTCOME_UNKNOWN,
    REMEMBERED_S,
    CallKey,
    IdempotencyStore,
    KeyedCall,
)
from relay.routing.port import Command, CommandAnswer, Idempotency, LocalRouter, answer_of
from schemas.errors import Failure, ToolError
from schemas.payloads import CmdAck


class KeyedCommands(LocalRouter):
    """A ``LocalRouter`` in front of ``router``. ``monotonic`` is in seconds."""

    def __init__(
        self, router: LocalRouter, store: IdempotencyStore[str], monotonic: Callable[[], float]
    ) -> None:
        self._router = router
        self._store = store
        self._monotonic = monotonic
        self._moved: dict[str, float] = {}
        self._history_unknown: set[str] = set()

    def moved(self, node_id: str) -> None:
        """Take in that another relay may have sent commands to the node until now.

        What it has sent under which key is not known here: until all such keys have expired, a key that is
        new here may be one of them.
        """
        now = self._monotonic()
        self._moved = {other: until for other, until in self._moved.items() if until > now}
        self._moved[node_id] = now + REMEMBERED_S

    def history_unknown(self, node_id: str, whether: bool) -> None:  # noqa: FBT001 - as presence has it
        """Take in whether it is still to be found out who had the node before: until then, any may have."""
        (self._history_unknown.add if whether else self._history_unknown.discard)(node_id)

    def start(self, command: Command) -> CommandAnswer:
        """Send ``command``, as ``LocalRouter`` describes.

        The errors of one with a key are also DEADLINE_EXCEEDED if another under the same key may have run;
        ENVELOPE_INVALID if the key was used for other arguments; RATE_LIMITED if too many keys are in use.
        """
        if command.idempotency is None:
            return self._router.start(command)
        return answer_of(self._run_keyed(command, command.idempotency))

    async def _run_keyed(self, command: Command, idempotency: Idempotency) -> CmdAck:
        key: CallKey = (idempotency.caller, command.tool, idempotency.key)
        keyed = self._store.open(
            key, idempotency.arguments, command.correlation_id, repeatable=idempotency.repeatable
        )
        if keyed.running is not None:
            return await _outcome_of(keyed.running, command)
        if isinstance(keyed.outcome, str):
            return _read(keyed.outcome)
        if not keyed.may_be_sent(repeatable=idempotency.repeatable):
            raise ToolError(Failure.DEADLINE_EXCEEDED, OUTCOME_UNKNOWN)
        if self._may_have_run_elsewhere(command.node_id, keyed) and not idempotency.repeatable:
            self._store.forget(key)
            raise ToolError(Failure.DEADLINE_EXCEEDED, OUTCOME_UNKNOWN)
        running = asyncio.create_task(self._sent(key, command))
        keyed.begin(running)
        running.add_done_callback(_retrieve)
        try:
            return await _outcome_of(running, command)
        except asyncio.CancelledError:
            running.cancel()
            raise

    def _may_have_run_elsewhere(self, node_id: str, keyed: KeyedCall[str]) -> bool:
        may_be_known_elsewhere = (
            node_id in self._history_unknown or self._moved.get(node_id, 0.0) > self._monotonic()
        )
        return keyed.attempts == 0 and may_be_known_elsewhere

    async def _sent(self, key: CallKey, command: Command) -> str:
        """Send ``command``, and return the node's answer as it is kept."""
        try:
            answer = await self._router.run(command)
        except ToolError as error:
            self._store.ended(key, error.failure, None)
            raise
        failure = None if answer["ok"] else ToolError.from_node(answer["error"]).failure
        text = encoded(answer)
        self._store.ended(key, failure, text, len(text))
        return text


async def _outcome_of(running: "asyncio.Task[str]", command: Command) -> CmdAck:
    """Return the answer that ``running`` gets within the budget of ``command``, without ending it."""
    await asyncio.wait({running}, timeout=command.deadline_ms / 1000)
    if not running.done():
        raise ToolError(Failure.DEADLINE_EXCEEDED)
    if running.cancelled():
        raise ToolError(Failure.DEADLINE_EXCEEDED, OUTCOME_UNKNOWN)
    return _read(running.result())


def _read(outcome: str) -> CmdAck:
    answer: CmdAck = json.loads(outcome)
    return answer


def _retrieve(task: "asyncio.Task[str]") -> None:
    """Retrieve the error of a command that nothing waits for any more: else asyncio reports it."""
    if not task.cancelled():
        task.exception()
