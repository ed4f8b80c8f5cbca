"""Calls that carry an idempotency key: for ten minutes, the same call is made once.

A key is of one caller and one tool. ``IdempotencyStore`` keeps the outcome of a call that was sent, and the
task of one in flight, and decides what becomes of a key. The relay that a call arrives at has one, behind
``IdempotentCalls``; in a fleet of several relays the one that holds the node's session has another, behind
``KeyedCommands``, since a call may be repeated by way of another relay. ``KeyedCall.begin`` makes a key
running. ``IdempotencyStore.ended`` keeps the outcome if the node has answered, and forgets the key if no
attempt has run. Otherwise the outcome is unknown: only a call that may run twice is sent again.

A key keeps a call from running twice, which does harm only where the tool may not run twice. So while there
is no room, the ended keys of tools that may are the first to go, and calls of these are not refused for it.

Must not decide who may call: that is decided for each repetition before it gets here.
"""

import asyncio
import json
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from dataclasses import fields as dataclass_fields
from functools import partial
from hashlib import sha256
from typing import Any, Generic, TypeVar

from attrs import define, field
from structlog.typing import FilteringBoundLogger

from relay.audit.log import AuditUnavailableError
from relay.audit.writer import AuditWriter
from relay.auth.agent_tokens import AgentName, Principal
from relay.auth.permissions import Rights
from relay.calls.executor import CallExecutor, CallRecord
from relay.calls.relay_tools import RelayTool
from relay.calls.results import CallAnswer, refused_by_node
from relay.fleet.selection import Selection
from relay.fleet.tools import Tool
from relay.limits.rate_limits import Limiter
from relay.observability.ascii_json import encoded
from relay.routing.port import Command, CommandAnswer, Idempotency, LocalRouter, answer_of
from schemas.canonical import jcs
from schemas.errors import Failure, ToolError
from schemas.payloads import CmdAck

REMEMBERED_S = 600.0

NOT_RUN = frozenset({Failure.NODE_OFFLINE, Failure.RATE_LIMITED})
"""After these a command has certainly not run: ``NodeRouter`` guarantees it of the first, the limits of the
capability or the node of the second. After any other failure without the node's answer it may have run."""

OUTCOME_UNKNOWN = "The first call under this key may have run; its outcome is not known."


@dataclass(frozen=True, slots=True)
class Quota:
    """The limits of one holder: how many keys, and how many bytes of stored answers."""

    keys: int
    size: int


QUOTA_OF_ALL = Quota(10_000, 64 * 1024 * 1024)
QUOTA_OF_TENANT = Quota(2500, 16 * 1024 * 1024)
QUOTA_OF_CALLER = Quota(1000, 8 * 1024 * 1024)
"""No agent, and no tenant with many agents, can use up the quota of all."""

CallKey = tuple[AgentName, str, str]
"""The caller, the canonical tool, and the idempotency key."""

AnswerT = TypeVar("AnswerT")
"""What is kept of an answer: parsed, it takes about three times the memory of its text."""


@dataclass(slots=True)
class KeyedCall(Generic[AnswerT]):
    """One idempotency key: a hash of its arguments, and the state of its call.

    Attributes:
        first: the correlation id of the first call under the key.
        attempts: how many times it was sent.
        running: the call in flight, if any.
        outcome: the answer, or the error, once it is known.
        unknown: whether the last attempt may have run, without a known outcome.
        size: how many bytes the answer has.
        repeatable: whether the call may run twice.
    """

    arguments: str
    first: str
    expires_at: float
    repeatable: bool = False
    attempts: int = 0
    running: asyncio.Task[Any] | None = None
    outcome: AnswerT | ToolError | None = None
    unknown: bool = False
    size: int = 0

    def may_be_sent(self, *, repeatable: bool) -> bool:
        if self.running is not None or self.outcome is not None:
            return False
        return not self.unknown or repeatable

    def begin(self, running: asyncio.Task[Any]) -> None:
        """Note that ``running`` makes an attempt: from now on the call may have run."""
        self.attempts += 1
        self.unknown = True
        self.running = running

        def no_longer_running(_: asyncio.Task[Any]) -> None:
            self.running = None

        running.add_done_callback(no_longer_running)


@define(eq=False, repr=False)
class _Holding:
    """The usage of one holder: its keys, oldest first, and the size of its answers.

    Attributes:
        repeatable: those of its keys whose calls may run twice.
    """

    keys: dict[CallKey, None] = field(factory=dict)
    repeatable: dict[CallKey, None] = field(factory=dict)
    size: int = 0

    def is_within(self, quota: Quota) -> bool:
        return len(self.keys) < quota.keys and self.size < quota.size


@define(eq=False, repr=False)
class IdempotencyStore(Generic[AnswerT]):
    """The keys of all callers, in the order in which they were first used. ``clock`` is in seconds."""

    _clock: Callable[[], float]
    _of_all: Quota = QUOTA_OF_ALL
    _of_tenant: Quota = QUOTA_OF_TENANT
    _of_caller: Quota = QUOTA_OF_CALLER
    _holdings: defaultdict[object, _Holding] = field(init=False, factory=lambda: defaultdict(_Holding))
    _keyed_calls: OrderedDict[CallKey, KeyedCall[AnswerT]] = field(init=False, factory=OrderedDict)

    def __len__(self) -> int:
        return len(self._keyed_calls)

    def open(
        self, key: CallKey, arguments: str, correlation_id: str, *, repeatable: bool = False
    ) -> KeyedCall[AnswerT]:
        """Return what is known under ``key``, made if it is new; ``arguments`` is a hash of the call's.

        ``repeatable``: the call may run twice.

        Raises:
            ToolError: ENVELOPE_INVALID if the key was used for other arguments; RATE_LIMITED if there is no
                quota for another key of a call that may not run twice: no other such key is evicted for it.
        """
        now = self._clock()
        keyed = self._keyed_calls.get(key)
        if keyed is not None and keyed.expires_at <= now and keyed.running is None:
            self.forget(key)
            keyed = None
        if keyed is None:
            while self._keyed_calls:
                oldest, first = next(iter(self._keyed_calls.items()))
                if first.expires_at > now or first.running is not None:
                    break
                self.forget(oldest)
            self._make_room(now, key, repeatable=repeatable)
            keyed = KeyedCall(arguments, correlation_id, now + REMEMBERED_S, repeatable)
            self._keyed_calls[key] = keyed
            for holder in _holders(key):
                self._holdings[holder].keys[key] = None
                if repeatable:
                    self._holdings[holder].repeatable[key] = None
        elif keyed.arguments != arguments:
            raise ToolError(
                Failure.ENVELOPE_INVALID,
                "The idempotency key was used for other arguments of this tool.",
                fix="Use another key for another call.",
            )
        return keyed

    def forget(self, key: CallKey) -> None:
        """Remove ``key``: its call never reached the node, and may be made as a new one."""
        keyed = self._keyed_calls.pop(key, None)
        if keyed is None:
            return
        for holder in _holders(key):
            holding = self._holdings[holder]
            del holding.keys[key]
            holding.repeatable.pop(key, None)
            holding.size -= keyed.size
            if not holding.keys:
                del self._holdings[holder]

    def ended(
        self, key: CallKey, failure: Failure | None, answer: AnswerT | ToolError | None, size: int = 0
    ) -> None:
        """Note how the attempt under ``key`` has ended: with ``failure`` if it has failed.

        ``answer``, of ``size`` bytes, is what the node has answered: the outcome from now on. It is unknown
        without an answer, and if the node gave up.
        """
        if failure in NOT_RUN:
            self.not_run(key)
        elif answer is not None and failure is not Failure.DEADLINE_EXCEEDED:
            keyed = self._keyed_calls[key]
            keyed.outcome, keyed.unknown, keyed.size = answer, False, size
            for holder in _holders(key):
                self._holdings[holder].size += size

    def not_run(self, key: CallKey) -> None:
        """Note that the attempt under ``key`` has not run: forget it unless an earlier one may have."""
        if self._keyed_calls[key].attempts == 1:
            self.forget(key)

    def _make_room(self, now: float, new: CallKey, *, repeatable: bool) -> None:
        """Evict ended keys of calls that may run twice while there is no quota for ``new``.

        Those of its caller go first. A call that may run twice needs no quota: its key is beyond it while it
        runs, and goes next.
        """
        for holder, quota in zip(
            _holders(new), (self._of_caller, self._of_tenant, self._of_all), strict=True
        ):
            while (holding := self._holdings.get(holder)) is not None and not holding.is_within(quota):
                ended = (key for key in holding.repeatable if self._keyed_calls[key].running is None)
                if (oldest := next(ended, None)) is not None:
                    self.forget(oldest)
                elif repeatable:
                    break
                else:
                    first = self._keyed_calls[next(iter(holding.keys))]
                    wait_ms = max(1, int((first.expires_at - now) * 1000))
                    raise ToolError(
                        Failure.RATE_LIMITED, "Too many idempotency keys are in use.", retry_after_ms=wait_ms
                    )


def _known(facts: Rights | Selection) -> list[object]:
    """Return the members of ``facts`` as JSON, the same for equal ones."""
    members = (getattr(facts, field.name) for field in dataclass_fields(facts))
    return [sorted(each) if isinstance(each, frozenset) else each for each in members]


def _holders(key: CallKey) -> tuple[object, object, object]:
    caller = key[0]
    return caller, caller[1], "all"


@define(eq=False, repr=False)
class IdempotentCalls:
    """The calls that carry an idempotency key."""

    _executor: CallExecutor
    _store: IdempotencyStore[CallAnswer]
    _audit: AuditWriter
    _log: FilteringBoundLogger
    _running: set[asyncio.Task[CallAnswer]] = field(init=False, factory=set)

    async def run(  # noqa: PLR0913, PLR0917 - what decides the answer, and what counts it
        self,
        key: str,
        tool: Tool | RelayTool,
        principal: Principal,
        selection: Selection,
        record: CallRecord,
        share: Limiter,
    ) -> CallAnswer:
        """Make the call, or join the one in flight, or answer with its outcome.

        A call that is made counts in the agent's ``share`` on its own until it has ended.

        Raises:
            ToolError, AuditUnavailableError: as ``CallExecutor.run``; ENVELOPE_INVALID if the key was used
                for other arguments or by another view, or where the answer depends on them, with other rights
                or by another selection; RATE_LIMITED if too many keys are in use.
        """
        # Hashed: where the form of calls is not enforced, a key may have any length.
        hashed_key = sha256(key.encode("utf-8", "surrogatepass")).hexdigest()
        key_of_call: CallKey = (principal.name, tool.canonical, hashed_key)
        beside: list[object] = []
        if isinstance(tool, RelayTool):
            beside = [_known(principal.rights), _known(selection)]
        elif tool.surface.verb.guarded:
            beside = [_known(principal.rights)]
        if record.directed is not None:  # the answer has the form of the kinds view
            beside.append(record.directed.for_s)
        decides = [record.call.arguments, *beside] if beside else record.call.arguments
        arguments = sha256(jcs(decides)).hexdigest()
        try:
            keyed = self._store.open(
                key_of_call, arguments, record.correlation_id, repeatable=tool.idempotent
            )
        except ToolError as error:
            await self._audit.record(record.denied(error))
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
        # When the caller disconnects, the call goes on, and a repetition gets its outcome. Since Python 3.14,
        # asyncio.shield would report an error that comes afterwards.
        try:
            await asyncio.wait({running})
        except asyncio.CancelledError:
            running.add_done_callback(partial(self._report, record.correlation_id))
            raise
        return running.result()

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
            went_away = record.answered and error.failure is Failure.NODE_OFFLINE
            self._store.ended(key_of_call, None if went_away else error.failure, outcome)
            raise
        # The text alone: parsed, it takes about three times the memory.
        size = len(answer.text) + sum(len(image["data"]) for image in answer.images)
        self._store.ended(key_of_call, None, CallAnswer(answer.text, images=answer.images), size)
        return answer

    async def _repeated(
        self, keyed: KeyedCall[CallAnswer], tool: Tool | RelayTool, record: CallRecord
    ) -> CallAnswer:
        record.first, record.attempt = keyed.first, keyed.attempts
        async with self._executor.recorded(record):
            if keyed.running is not None:
                try:
                    async with asyncio.timeout(self._executor.budget_ms(tool, record) / 1000):
                        async with self._executor.in_flight(record):
                            return await _result_of_first(keyed.running)
                except TimeoutError:
                    raise ToolError(Failure.DEADLINE_EXCEEDED) from None
            if keyed.outcome is None:
                raise ToolError(Failure.DEADLINE_EXCEEDED, OUTCOME_UNKNOWN)
            if isinstance(keyed.outcome, ToolError):
                raise _without_traceback(keyed.outcome)
            text, images = keyed.outcome.text, keyed.outcome.images
            return CallAnswer(text, result=json.loads(text), images=images)


async def _result_of_first(running: "asyncio.Task[CallAnswer]") -> CallAnswer:
    await asyncio.wait({running})
    try:
        return running.result()
    except ToolError as error:
        if error.failure is Failure.TOKEN_REFUSED:
            # The first caller's token was revoked; the one that joined has another, which is accepted.
            raise ToolError(Failure.DEADLINE_EXCEEDED, OUTCOME_UNKNOWN) from None
        raise


def _without_traceback(error: ToolError) -> ToolError:
    """Return the same error without its traceback, which would keep the frames alive."""
    return ToolError(error.failure, error.detail, fix=error.fix, retry_after_ms=error.retry_after_ms)


@define(eq=False, repr=False)
class KeyedCommands(LocalRouter):
    """A ``LocalRouter`` in front of ``router``. ``monotonic`` is in seconds."""

    _router: LocalRouter
    _store: IdempotencyStore[str]
    _monotonic: Callable[[], float]
    _moved: dict[str, float] = field(init=False, factory=dict)
    _history_unknown: set[str] = field(init=False, factory=set)

    def moved(self, node_id: str) -> None:
        """Note that another relay may have sent commands to the node until now.

        What it has sent under which key is not known here: until all such keys have expired, a key that is
        new here may be one of them.
        """
        now = self._monotonic()
        self._moved = {other: until for other, until in self._moved.items() if until > now}
        self._moved[node_id] = now + REMEMBERED_S

    def history_unknown(self, node_id: str, whether: bool) -> None:  # noqa: FBT001 - as presence has it
        """Note whether it is still to be found out who had the node before: until then, any may have."""
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
            answer: CmdAck = json.loads(keyed.outcome)
            return answer
        if not keyed.may_be_sent(repeatable=idempotency.repeatable):
            raise ToolError(Failure.DEADLINE_EXCEEDED, OUTCOME_UNKNOWN)
        may_be_known_elsewhere = (
            command.node_id in self._history_unknown
            or self._moved.get(command.node_id, 0.0) > self._monotonic()
        )
        if keyed.attempts == 0 and may_be_known_elsewhere and not idempotency.repeatable:
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

    async def _sent(self, key: CallKey, command: Command) -> CmdAck:
        """Send ``command``, return the node's answer, and keep its text."""
        try:
            answer = await self._router.run(command)
        except ToolError as error:
            self._store.ended(key, error.failure, None)
            raise
        failure = None if answer["ok"] else refused_by_node(answer).failure
        text = encoded(answer)
        self._store.ended(key, failure, text, len(text))
        return answer


async def _outcome_of(running: "asyncio.Task[CmdAck]", command: Command) -> CmdAck:
    """Return the answer that ``running`` gets within the budget of ``command``, without ending it."""
    await asyncio.wait({running}, timeout=command.deadline_ms / 1000)
    if not running.done():
        raise ToolError(Failure.DEADLINE_EXCEEDED)
    if running.cancelled():
        raise ToolError(Failure.DEADLINE_EXCEEDED, OUTCOME_UNKNOWN)
    return running.result()


def _retrieve(task: "asyncio.Task[CmdAck]") -> None:
    """Retrieve the error of a command that nothing waits for any more: else asyncio reports it."""
    if not task.cancelled():
        task.exception()
