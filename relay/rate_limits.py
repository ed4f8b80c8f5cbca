"""How often, and how much at once: what a node has said that it bears, and what one agent may take.

Token buckets and counts, on a clock that comes in from outside. A full gate answers at once, and says when
to come again; nobody queues. Must not know what is called.
"""

import math
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Generic, Protocol, TypeVar

from schemas.errors import Failure, ToolError
from schemas.token_bucket import TokenBucket

BUSY_RETRY_MS = 100
"""What is said of a gate that is full: nobody knows when a call will end."""
_LONGEST_RETRY_MS = 86_400_000
_MAX_GATES = 20_000
_LOOKED_AT = 32


@dataclass(frozen=True, slots=True)
class Allowance:
    """What passes a gate: ``rate`` a second, after ``burst`` at once, and ``concurrency`` at a time."""

    rate: float
    burst: float
    concurrency: int


class Gate:
    """One gate: a token bucket, and a count of those inside."""

    __slots__ = ("_allowance", "_bucket", "_inside")

    def __init__(self, allowance: Allowance, now: float) -> None:
        self._allowance = allowance
        self._bucket = TokenBucket(allowance.rate, allowance.burst, now)
        self._inside = 0

    def enter(self, now: float, cost: float = 1.0) -> None:
        """Let one in.

        Raises:
            ToolError: RATE_LIMITED, with ``retry_after_ms``. Whoever is refused uses nothing up.
        """
        if self._inside >= self._allowance.concurrency:
            raise ToolError(Failure.RATE_LIMITED, retry_after_ms=BUSY_RETRY_MS)
        if (wait_s := self._bucket.take(now, cost)) > 0:
            # A node may announce a rate next to nothing, and the envelope has no word for ages.
            retry_ms = math.ceil(min(wait_s * 1000, _LONGEST_RETRY_MS))
            raise ToolError(Failure.RATE_LIMITED, retry_after_ms=max(1, retry_ms))
        self._inside += 1

    def enter_too(self) -> None:
        """Let in what somebody inside has brought along, which may stay longer than they do."""
        self._inside += 1

    def leave(self) -> None:
        """Let one out."""
        self._inside -= 1

    def change(self, allowance: Allowance) -> None:
        """Go by ``allowance`` from now on; what has been used up stays used up."""
        if allowance != self._allowance:
            self._allowance = allowance
            self._bucket.change(allowance.rate, allowance.burst)

    def is_idle(self, now: float) -> bool:
        """Tell whether a new gate would be no different."""
        return self._inside == 0 and self._bucket.is_full(now)


KeyT = TypeVar("KeyT", bound=Hashable)


class _Idle(Protocol):
    """What can be forgotten when it is idle."""

    def is_idle(self, now: float) -> bool:
        """Tell whether a new one would be no different."""
        ...


_IdleT = TypeVar("_IdleT", bound=_Idle)


def forget_idle(kept: OrderedDict[KeyT, _IdleT], at_most: int, now: float) -> bool:
    """Make room for one more if there are ``at_most``; tell whether there is any.

    Looks at a few only, the longest unused first. Those that are not idle are put behind the others: they
    must not stand for ever before what could be forgotten.
    """
    for key in list(islice(kept, _LOOKED_AT)) if len(kept) >= at_most else ():
        if not kept[key].is_idle(now):
            kept.move_to_end(key)
            continue
        del kept[key]
        if len(kept) < at_most:
            break
    return len(kept) < at_most


class Gates(Generic[KeyT]):
    """A gate for each key, made when it is first needed, forgotten when it is idle and there are many."""

    def __init__(self, clock: Callable[[], float], max_gates: int = _MAX_GATES) -> None:
        self._clock = clock
        self._max_gates = max_gates
        self._gates: OrderedDict[KeyT, Gate] = OrderedDict()

    def __len__(self) -> int:
        return len(self._gates)

    @contextmanager
    def passed(self, key: KeyT, allowance: Allowance, cost: float = 1.0) -> Iterator[None]:
        """Be inside the gate of ``key`` for the length of the block.

        Raises:
            ToolError: RATE_LIMITED, with ``retry_after_ms``.
        """
        gate = self.enter(key, allowance, cost)
        try:
            yield
        finally:
            gate.leave()

    def enter(self, key: KeyT, allowance: Allowance, cost: float = 1.0) -> Gate:
        """Go through the gate of ``key``, and return it: it is to be left again.

        Raises:
            ToolError: RATE_LIMITED, with ``retry_after_ms``.
        """
        now = self._clock()
        gate = self._gate(key, allowance, now)
        gate.enter(now, cost)
        return gate

    def _gate(self, key: KeyT, allowance: Allowance, now: float) -> Gate:
        gate = self._gates.get(key)
        if gate is None:
            # One that is not idle is never forgotten, and then there are more than there should be.
            forget_idle(self._gates, self._max_gates, now)
            gate = self._gates[key] = Gate(allowance, now)
        else:
            gate.change(allowance)
            self._gates.move_to_end(key)
        return gate
