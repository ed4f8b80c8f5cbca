"""How often, and how many at once: limiters by token buckets and counts, with a rate that holders may share.

A full limiter refuses at once with a retry time; nothing queues. The clock is an argument. Must not know what
is limited: of an agent it has only the usual allowance.
"""

import math
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from operator import attrgetter
from typing import Generic, Protocol, TypeVar

from attrs import define, field

from schemas.errors import Failure, ToolError
from schemas.pacing import TokenBucket


@dataclass(frozen=True, slots=True)
class Allowance:
    """What a limiter allows: ``rate`` a second, after ``burst`` at once, and ``concurrency`` at a time."""

    rate: float
    burst: float
    concurrency: int


AGENT_BURST_S = 3
"""How many seconds' worth an agent may take at once: listing the tools of thousands of nodes is one burst."""

PER_AGENT = Allowance(rate=300, burst=300 * AGENT_BURST_S, concurrency=64)
"""What one agent may use of a relay that serves about a thousand calls a second."""

BUSY_RETRY_MS = 100
"""The retry time while ``concurrency`` is used up: when a call will end is not known."""
_LONGEST_RETRY_MS = 86_400_000
_MAX_LIMITERS = 20_000
_EXAMINED = 32

PRESENT_S = 10.0
"""For so long after it has asked, a holder's share is kept for it."""
MAX_PRESENT = 128
"""The holders of one bucket that are known; of more, the one that asked longest ago is forgotten."""

_SPARE_FROM = 4.0
_TURN_S = 1.0
_ROUNDING = 1e-6


@dataclass(slots=True)
class _Holder:
    """One holder: what it has taken that is not refilled yet, and until when the next token is its turn."""

    asked_at: float
    used: float = 0.0
    served_at: float = -math.inf
    turn_until: float = -math.inf


class FairShares:
    """Divides one token bucket among those who take from it: max-min fair, without a queue.

    What a holder has taken is refilled in equal parts with what the others have, so that who takes less than
    its part leaves the rest to them. Each may use an equal share of the burst; beyond it only what leaves the
    others theirs. So one that asks seldom finds a token, however often another asks, and no rate is left
    unused. Where there are fewer tokens than holders, those that were refused within their share come first,
    the one served longest ago before the others. A burst of four or more keeps one token for a holder that
    has not asked lately. Those that asked last are at the end. Times are seconds of the bucket's clock.
    """

    __slots__ = ("_at", "_holders", "_taken")

    def __init__(self, now: float) -> None:
        self._at = now
        self._holders: dict[Hashable, _Holder] = {}
        self._taken = 0.0  # since all was refilled

    def __len__(self) -> int:
        return len(self._holders)

    def take(
        self, bucket: TokenBucket, allowance: Allowance, who: Hashable, now: float, cost: float
    ) -> float:
        """Take ``cost`` for ``who`` and return 0, or take nothing and return the seconds to wait."""
        self._refill(now, allowance.rate)
        holder = self._present(who, now)
        others = [each for each in self._holders.values() if each is not holder]
        # From full, one alone may take the whole burst.
        spare = cost if allowance.burst >= _SPARE_FROM and self._taken + cost > allowance.burst else 0.0
        share = max(cost, (allowance.burst - spare) / len(self._holders))
        within_share = holder.used + cost <= share + _ROUNDING
        if within_share:
            before = [each for each in others if each.turn_until > now and each.served_at < holder.served_at]
            kept = cost * len(before)
        else:
            kept = spare + sum(max(0.0, share - each.used) for each in others)
            kept = min(kept, allowance.burst - cost)
        wait_s = bucket.take(now, cost, kept)
        if wait_s > 0:
            holder.turn_until = now + wait_s + _TURN_S if within_share else -math.inf
            return wait_s
        holder.used += cost
        holder.served_at, holder.turn_until = now, -math.inf
        self._taken += cost
        return 0.0

    def _present(self, who: Hashable, now: float) -> _Holder:
        holder = self._holders.pop(who, None)
        if holder is None:
            holder = _Holder(now)
            if len(self._holders) >= MAX_PRESENT:
                del self._holders[next(iter(self._holders))]
        holder.asked_at = now
        self._holders[who] = holder
        return holder

    def _refill(self, now: float, rate: float) -> None:
        """Refill equal parts of what the holders have used, and forget those that are away."""
        left = max(0.0, now - self._at) * rate
        self._at = now
        using = [each for each in self._holders.values() if each.used > 0]
        if len(using) > 1:
            using.sort(key=attrgetter("used"))
        for index, holder in enumerate(using):
            part = left / (len(using) - index)
            part = min(holder.used, part)
            holder.used -= part
            left -= part
        if left > 0:
            self._taken = 0.0
        for who, holder in list(self._holders.items()):
            if holder.used > 0 or holder.asked_at + PRESENT_S > now or holder.turn_until > now:
                break
            del self._holders[who]


class Limiter:
    """One limiter: a token bucket, and a count of what is in flight.

    Where a holder is named, the rate is divided among those that are.
    """

    __slots__ = ("_allowance", "_bucket", "_in_flight", "_shares")

    def __init__(self, allowance: Allowance, now: float) -> None:
        self._allowance = allowance
        self._bucket = TokenBucket(allowance.rate, allowance.burst, now)
        self._in_flight = 0
        self._shares: FairShares | None = None

    def acquire(self, now: float, cost: float = 1.0, holder: Hashable = None) -> None:
        """Charge ``cost`` to ``holder``, and count one in flight.

        Raises:
            ToolError: RATE_LIMITED, with ``retry_after_ms``. A refusal uses nothing up.
        """
        if self._in_flight >= self._allowance.concurrency:
            raise ToolError(Failure.RATE_LIMITED, retry_after_ms=BUSY_RETRY_MS)
        self.charge(now, cost, holder)
        self._in_flight += 1

    def charge(self, now: float, cost: float, holder: Hashable = None) -> None:
        """Take ``cost`` from the rate alone, however many are in flight.

        Raises:
            ToolError: as ``acquire``.
        """
        if holder is None:
            wait_s = self._bucket.take(now, cost)
        else:
            if self._shares is None:
                self._shares = FairShares(now)
            wait_s = self._shares.take(self._bucket, self._allowance, holder, now, cost)
        if wait_s > 0:
            # A node may announce a rate near zero; the envelope's retry time is bounded.
            retry_ms = math.ceil(min(wait_s * 1000, _LONGEST_RETRY_MS))
            raise ToolError(Failure.RATE_LIMITED, retry_after_ms=max(1, retry_ms))

    def acquire_extra(self) -> None:
        """Count one more in flight, started by one that was admitted; it may outlast that one."""
        self._in_flight += 1

    def release(self) -> None:
        self._in_flight -= 1

    def change(self, allowance: Allowance) -> None:
        """Apply ``allowance`` from now on; what has been used up stays used up."""
        # It is nearly always the same object, and dataclasses are compared member by member.
        if allowance is not self._allowance and allowance != self._allowance:
            self._allowance = allowance
            self._bucket.change(allowance.rate, allowance.burst)

    def is_idle(self, now: float) -> bool:
        return self._in_flight == 0 and self._bucket.is_full(now)


KeyT = TypeVar("KeyT", bound=Hashable)


class _Idle(Protocol):
    """What can be evicted while it is idle."""

    def is_idle(self, now: float) -> bool:
        """Return whether a new one would be no different."""
        ...


_IdleT = TypeVar("_IdleT", bound=_Idle)


def evict_idle(kept: OrderedDict[KeyT, _IdleT], at_most: int, now: float) -> bool:
    """Make space for one more if there are ``at_most``; return whether there is any.

    Examines a few only, least recently used first. Those that are not idle are moved to the end, so that
    they cannot block the eviction of others.
    """
    for key in list(islice(kept, _EXAMINED)) if len(kept) >= at_most else ():
        if not kept[key].is_idle(now):
            kept.move_to_end(key)
            continue
        del kept[key]
        if len(kept) < at_most:
            break
    return len(kept) < at_most


@define(eq=False, repr=False)
class KeyedLimiters(Generic[KeyT]):
    """A limiter for each key, made when it is first needed, evicted when it is idle and there are many."""

    _clock: Callable[[], float]
    _max_limiters: int = _MAX_LIMITERS
    _limiters: OrderedDict[KeyT, Limiter] = field(init=False, factory=OrderedDict)

    def __len__(self) -> int:
        return len(self._limiters)

    @contextmanager
    def held(self, key: KeyT, allowance: Allowance, cost: float = 1.0) -> Iterator[None]:
        """Count towards the limiter of ``key`` for the length of the block.

        Raises:
            ToolError: RATE_LIMITED, with ``retry_after_ms``.
        """
        limiter = self.acquire(key, allowance, cost)
        try:
            yield
        finally:
            limiter.release()

    def acquire(self, key: KeyT, allowance: Allowance, cost: float = 1.0, holder: Hashable = None) -> Limiter:
        """Acquire the limiter of ``key`` for ``holder`` and return it; the caller releases it.

        Raises:
            ToolError: RATE_LIMITED, with ``retry_after_ms``.
        """
        now = self._clock()
        limiter = self._limiter(key, allowance, now)
        limiter.acquire(now, cost, holder)
        return limiter

    def charge(self, key: KeyT, allowance: Allowance, cost: float) -> None:
        """Charge ``cost`` to the rate of ``key`` alone.

        Raises:
            ToolError: RATE_LIMITED, with ``retry_after_ms``.
        """
        now = self._clock()
        self._limiter(key, allowance, now).charge(now, cost)

    def _limiter(self, key: KeyT, allowance: Allowance, now: float) -> Limiter:
        limiter = self._limiters.get(key)
        if limiter is None:
            # One that is not idle is never evicted, so there can be more than ``max_limiters``.
            evict_idle(self._limiters, self._max_limiters, now)
            limiter = self._limiters[key] = Limiter(allowance, now)
        else:
            limiter.change(allowance)
            self._limiters.move_to_end(key)
        return limiter
