"""Divides one token bucket among those who take from it: max-min fair, without a queue.

What a holder has taken is refilled in equal parts with what the others have, so that who takes less than its
part leaves the rest to them. Each may use an equal share of the burst; beyond it only what leaves the others
theirs. So one that asks seldom finds a token, however often another asks, and no rate is left unused. Where
there are fewer tokens than holders, those that were refused within their share come first, the one served
longest ago before the others.

A burst of four or more keeps one token for a holder that has not asked lately. The total is the bucket's in
every case. Must not know what is divided.
"""

import math
from collections.abc import Hashable
from dataclasses import dataclass
from operator import attrgetter

from relay.limits.allowance import Allowance
from schemas.token_bucket import TokenBucket

PRESENT_S = 10.0
"""For so long after it has asked, a holder's share is kept for it."""
MAX_PRESENT = 32
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
    """The holders of one bucket, those that asked last at the end. Times are seconds of its clock."""

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
