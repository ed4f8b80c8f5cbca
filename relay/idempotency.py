"""What became of calls that carry an idempotency key: within a time, the same call is made once.

Keyed by who calls which tool under which key. What is remembered is the outcome of a call that was really
sent; one that is under way is joined. Must not decide who may call, nor send anything.
"""

import asyncio
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from schemas.errors import Failure, ToolError

REMEMBERED_S = 600.0
MAX_KEYS = 10_000
MAX_KEYS_OF_ONE = 1000
"""How many keys one caller may have in use: nobody can take the room of all."""

MAX_BYTES = 64 * 1024 * 1024
"""How much the remembered answers may be in all, as text."""

Caller = tuple[str, str, str]
"""Issuer, tenant, subject."""

Key = tuple[Caller, str, str]
"""The caller, the canonical tool, and the idempotency key."""

AnswerT = TypeVar("AnswerT")


@dataclass(slots=True)
class Memory(Generic[AnswerT]):
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


class IdempotencyStore(Generic[AnswerT]):
    """The keys of all callers, in the order in which they were first used. ``clock`` is in seconds."""

    def __init__(
        self,
        clock: Callable[[], float],
        max_keys: int = MAX_KEYS,
        max_keys_of_one: int = MAX_KEYS_OF_ONE,
        max_bytes: int = MAX_BYTES,
    ) -> None:
        self._clock = clock
        self._max_keys = max_keys
        self._max_keys_of_one = max_keys_of_one
        self._max_bytes = max_bytes
        self._bytes = 0
        self._held: defaultdict[Caller, dict[Key, None]] = defaultdict(dict)
        self._memories: OrderedDict[Key, Memory[AnswerT]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._memories)

    def open(self, key: Key, arguments: str, correlation_id: str) -> Memory[AnswerT]:
        """Return what is known under ``key``, made if it is new; ``arguments`` is a hash of the call's.

        Raises:
            ToolError: ENVELOPE_INVALID if the key stands for other arguments; RATE_LIMITED if there is no
                room for another key: one that counts is never forgotten for a new one.
        """
        now = self._clock()
        memory = self._memories.get(key)
        if memory is not None and memory.expires_at <= now and memory.running is None:
            self.forget(key)
            memory = None
        if memory is None:
            self._make_room(now, key[0])
            memory = Memory(arguments, correlation_id, now + REMEMBERED_S)
            self._memories[key] = memory
            self._held[key[0]][key] = None
        elif memory.arguments != arguments:
            raise ToolError(
                Failure.ENVELOPE_INVALID, "The idempotency key was used for other arguments of this tool."
            )
        return memory

    def forget(self, key: Key) -> None:
        """Forget ``key``: its call never reached the node, and may be made as if it was new."""
        memory = self._memories.pop(key, None)
        if memory is None:
            return
        self._bytes -= memory.size
        held = self._held[key[0]]
        del held[key]
        if not held:
            del self._held[key[0]]

    def keep(self, key: Key, answer: AnswerT, size: int) -> None:
        """Remember ``answer``, of ``size`` bytes, as what became of the call under ``key``."""
        memory = self._memories[key]
        memory.outcome, memory.size = answer, size
        self._bytes += size

    def _make_room(self, now: float, caller: Caller) -> None:
        while self._memories:
            key, memory = next(iter(self._memories.items()))
            if memory.expires_at > now or memory.running is not None:
                break
            self.forget(key)
        held = self._held.get(caller, {})
        if len(held) >= self._max_keys_of_one:
            oldest = next(iter(held))
        elif len(self._memories) >= self._max_keys or self._bytes >= self._max_bytes:
            oldest = next(iter(self._memories))
        else:
            return
        wait_ms = max(1, int((self._memories[oldest].expires_at - now) * 1000))
        raise ToolError(Failure.RATE_LIMITED, "Too many idempotency keys are in use.", retry_after_ms=wait_ms)
