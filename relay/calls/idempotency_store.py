"""What became of calls that carry an idempotency key: within a time, the same call is made once.

Keyed by who calls which tool under which key. What is remembered is the outcome of a call that was really
sent; one that is under way is joined. Must not decide who may call, nor send anything.
"""

import asyncio
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from schemas.errors import Failure, ToolError

REMEMBERED_S = 600.0


@dataclass(frozen=True, slots=True)
class Quota:
    """How many keys may be in use, and how much the remembered answers may be, as text."""

    keys: int
    size: int


QUOTA_OF_ALL = Quota(10_000, 64 * 1024 * 1024)
QUOTA_OF_TENANT = Quota(2500, 16 * 1024 * 1024)
QUOTA_OF_CALLER = Quota(1000, 8 * 1024 * 1024)
"""Nobody can take the room of all: neither one agent, nor one tenant with many."""

CallerName = tuple[str, str, str]
"""Issuer, tenant, subject."""

Key = tuple[CallerName, str, str]
"""The caller, the canonical tool, and the idempotency key."""

AnswerT = TypeVar("AnswerT")


@dataclass(slots=True)
class KeyedCall(Generic[AnswerT]):
    """One key: whose arguments it stands for, and what has become of the call.

    Attributes:
        first: the correlation id of the first call under the key.
        attempts: how often it was sent.
        running: the call under way; None when none is.
        outcome: the answer, or the error, once it is known; None while it is not.
        unknown: whether the last one that was sent may have run, and nobody knows.
        size: how many bytes the answer has.
    """

    arguments: str
    first: str
    expires_at: float
    attempts: int = 0
    running: asyncio.Task[AnswerT] | None = None
    outcome: AnswerT | ToolError | None = None
    unknown: bool = False
    size: int = 0


@dataclass(slots=True)
class _Holding:
    """What one holder has in use: its keys, oldest first, and the size of its answers."""

    keys: dict[Key, None] = field(default_factory=dict)
    size: int = 0


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
        self._quotas = (of_all, of_tenant, of_caller)
        self._holdings: defaultdict[object, _Holding] = defaultdict(_Holding)
        self._keyed_calls: OrderedDict[Key, KeyedCall[AnswerT]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._keyed_calls)

    def open(self, key: Key, arguments: str, correlation_id: str) -> KeyedCall[AnswerT]:
        """Return what is known under ``key``, made if it is new; ``arguments`` is a hash of the call's.

        Raises:
            ToolError: ENVELOPE_INVALID if the key stands for other arguments; RATE_LIMITED if there is no
                room for another key: one that counts is never forgotten for a new one.
        """
        now = self._clock()
        keyed = self._keyed_calls.get(key)
        if keyed is not None and keyed.expires_at <= now and keyed.running is None:
            self.forget(key)
            keyed = None
        if keyed is None:
            self._make_room(now, key)
            keyed = KeyedCall(arguments, correlation_id, now + REMEMBERED_S)
            self._keyed_calls[key] = keyed
            for holder in _holders(key):
                self._holdings[holder].keys[key] = None
        elif keyed.arguments != arguments:
            raise ToolError(
                Failure.ENVELOPE_INVALID, "The idempotency key was used for other arguments of this tool."
            )
        return keyed

    def forget(self, key: Key) -> None:
        """Forget ``key``: its call never reached the node, and may be made as if it was new."""
        keyed = self._keyed_calls.pop(key, None)
        if keyed is None:
            return
        for holder in _holders(key):
            holding = self._holdings[holder]
            del holding.keys[key]
            holding.size -= keyed.size
            if not holding.keys:
                del self._holdings[holder]

    def keep(self, key: Key, answer: AnswerT, size: int) -> None:
        """Remember ``answer``, of ``size`` bytes, as what became of the call under ``key``."""
        keyed = self._keyed_calls[key]
        keyed.outcome, keyed.size = answer, size
        for holder in _holders(key):
            self._holdings[holder].size += size

    def _make_room(self, now: float, new: Key) -> None:
        while self._keyed_calls:
            key, keyed = next(iter(self._keyed_calls.items()))
            if keyed.expires_at > now or keyed.running is not None:
                break
            self.forget(key)
        for holder, room in zip(_holders(new), self._quotas, strict=True):
            holding = self._holdings.get(holder)
            if holding is None or (len(holding.keys) < room.keys and holding.size < room.size):
                continue
            oldest = self._keyed_calls[next(iter(holding.keys))]
            wait_ms = max(1, int((oldest.expires_at - now) * 1000))
            raise ToolError(
                Failure.RATE_LIMITED, "Too many idempotency keys are in use.", retry_after_ms=wait_ms
            )


def _holders(key: Key) -> tuple[object, object, object]:
    """Return whose room a key takes: that of all, of its tenant, and of its caller."""
    caller = key[0]
    return "all", caller[1], caller
