"""Lets nodes in at a rate that the relay bears, when thousands of them come back at once.

Whoever comes too soon is given an appointment, each another one, so that they do not all come again in the
same moment. One address has half of it at most, so that nobody alone can keep the others out. Must not know
who they are: that is found out behind it, and costs the most.
"""

from collections import OrderedDict

from relay.address_groups import address_group
from relay.rate_limits import evict_idle
from schemas.token_bucket import TokenBucket

RATE_PER_S = 200.0
BURST = 50.0
LONGEST_WAIT_S = 60.0
_SHARE = 0.5
_MAX_ADDRESSES = 4096


class ConnectLimiter:
    """Token buckets that hand out times to come again. Times are seconds of one monotonic clock."""

    def __init__(
        self, rate: float = RATE_PER_S, burst: float = BURST, max_addresses: int = _MAX_ADDRESSES
    ) -> None:
        self._all = _Line(rate, burst, now=0.0)
        self._rate, self._burst = rate * _SHARE, max(1.0, burst * _SHARE)
        self._max_addresses = max_addresses
        self._lines: OrderedDict[str, _Line] = OrderedDict()

    def enter(self, now: float, address: str) -> float:
        """Let one in and return 0, or return in how many seconds, at most a minute, it is to come again.

        Whoever is sent away for the sake of all has used up some of its address's share: what one address can
        push back the appointments of all is bounded by that.
        """
        line = self._line_of(address, now)
        return (line.enter(now) if line is not None else 0.0) or self._all.enter(now)

    def _line_of(self, address: str, now: float) -> "_Line | None":
        """Return the line of an address; None for those that only stand in the line of all."""
        key = address_group(address)
        if key is None:
            return None
        line = self._lines.get(key)
        if line is not None:
            self._lines.move_to_end(key)
        elif evict_idle(self._lines, self._max_addresses, now):
            line = self._lines[key] = _Line(self._rate, self._burst, now)
        return line


class _Line:
    """Those who come at one bucket."""

    __slots__ = ("_bucket", "_next_free", "_rate")

    def __init__(self, rate: float, burst: float, now: float) -> None:
        self._rate = rate
        self._bucket = TokenBucket(rate, burst, now)
        self._next_free = 0.0

    def enter(self, now: float) -> float:
        if self._bucket.take(now) == 0:
            return 0.0
        wait_s = max(0.0, self._next_free - now) + 1 / self._rate
        # Not for longer, however many come: when they are gone, nobody waits for their appointments.
        wait_s = min(wait_s, LONGEST_WAIT_S)
        self._next_free = now + wait_s
        return wait_s

    def is_idle(self, now: float) -> bool:
        """Tell whether a new one would be no different."""
        return self._next_free <= now and self._bucket.is_full(now)
