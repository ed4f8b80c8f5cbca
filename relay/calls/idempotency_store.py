"""The outcomes of calls that carry an idempotency key: for ten minutes, the same call is made once.

A key is of one caller and one tool. The store keeps the outcome of a call that was sent, and the task
of one in flight. The relay that a call arrives at (``idempotent_calls``) and the one that holds the node
(``keyed_commands``) each have a store; what becomes of a key is decided here for both. ``KeyedCall.begin``
makes it running. ``IdempotencyStore.ended`` keeps the outcome if the node has answered, and forgets the key
if no attempt has run. Otherwise the outcome is unknown: only a call that may run twice is sent again.

A key keeps a call from running twice, which does harm only where the tool may not run twice. So while there
is no room, the ended keys of tools that may are the first to go, and calls of these are not refused for it.

Must not decide who may call, nor send anything.
"""

import asyncio
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from relay.auth.agent_tokens import AgentName
from schemas.errors import Failure, ToolError

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
    running: asyncio.Task[AnswerT] | None = None
    outcome: AnswerT | ToolError | None = None
    unknown: bool = False
    size: int = 0

    def may_be_sent(self, *, repeatable: bool) -> bool:
        """Return whether an attempt may be made; ``repeatable``: the call may run twice."""
        if self.running is not None or self.outcome is not None:
            return False
        return not self.unknown or repeatable

    def begin(self, running: asyncio.Task[AnswerT]) -> None:
        """Take in that ``running`` makes an attempt: from now on the call may have run."""
        self.attempts += 1
        self.unknown = True
        self.running = running
        running.add_done_callback(self._no_longer_running)

    def _no_longer_running(self, _: asyncio.Task[AnswerT]) -> None:
        self.running = None


@dataclass(slots=True)
class _Holding:
    """The usage of one holder: its keys, oldest first, and the size of its answers.

    Attributes:
        repeatable: those of its keys whose calls may run twice.
    """

    keys: dict[CallKey, None] = field(default_factory=dict)
    repeatable: dict[CallKey, None] = field(default_factory=dict)
    size: int = 0

    def is_within(self, quota: Quota) -> bool:
        """Return whether there is room for another key."""
        return len(self.keys) < quota.keys and self.size < quota.size


class IdempotencyStore(Generic[AnswerT]):
    """The keys of all callers, in the order in which they were first used. ``clock`` is in seconds."""

    def __init__(
        self,
        clock: Callable[[], float],
        of_all: Quota = QUOTA_OF_ALL,
        of_tenant: Quota = QUOTA_OF_TENANT,
        of_caller: Quota = QUOTA_OF_CALLER,
    ) -> None:
        self._clock = clock
        self._quotas = (of_caller, of_tenant, of_all)
        self._holdings: defaultdict[object, _Holding] = defaultdict(_Holding)
        self._keyed_calls: OrderedDict[CallKey, KeyedCall[AnswerT]] = OrderedDict()

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
            self._evict_expired(now)
            self._make_room(now, key, repeatable=repeatable)
            keyed = KeyedCall(arguments, correlation_id, now + REMEMBERED_S, repeatable)
            self._keyed_calls[key] = keyed
            for holder in _holders(key):
                self._holdings[holder].keys[key] = None
                if repeatable:
                    self._holdings[holder].repeatable[key] = None
        elif keyed.arguments != arguments:
            raise ToolError(
                Failure.ENVELOPE_INVALID, "The idempotency key was used for other arguments of this tool."
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
        """Take in how the attempt under ``key`` has ended: with ``failure`` if it has failed.

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
        """Take in that the attempt under ``key`` has not run: forget it unless an earlier one may have."""
        if self._keyed_calls[key].attempts == 1:
            self.forget(key)

    def _evict_expired(self, now: float) -> None:
        while self._keyed_calls:
            key, keyed = next(iter(self._keyed_calls.items()))
            if keyed.expires_at > now or keyed.running is not None:
                break
            self.forget(key)

    def _make_room(self, now: float, new: CallKey, *, repeatable: bool) -> None:
        """Evict ended keys of calls that may run twice while there is no quota for ``new``.

        Those of its caller go first. A call that may run twice needs no quota: its key is beyond it while it
        runs, and goes next.
        """
        for holder, quota in zip(_holders(new), self._quotas, strict=True):
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


def _holders(key: CallKey) -> tuple[object, object, object]:
    """Return the holders whose quota a key uses: its caller, its tenant, and all."""
    caller = key[0]
    return caller, caller[1], "all"
