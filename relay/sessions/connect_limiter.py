"""Limits the rate at which nodes connect, for when thousands of them reconnect at once.

A node over the rate gets a retry time, each another one, so that they do not all reconnect at the same
moment. One address gets half of the rate at most, so that it cannot starve the others. Must not identify
nodes: that is done after it, and costs the most.
"""

from collections import OrderedDict

from relay.limits.address_groups import address_group
from relay.limits.rate_limits import evict_idle
from schemas.token_bucket import TokenBucket

RATE_PER_S = 300.0
BURST = 75.0
LONGEST_WAIT_S = 60.0
_SHARE = 0.5
_MAX_ADDRESSES = 4096


class ConnectLimiter:
    """Token buckets that give retry times. Times are seconds of one monotonic clock."""

    def __init__(
        self, rate: float = RATE_PER_S, burst: float = BURST, max_addresses: int = _MAX_ADDRESSES
    ) -> None:
        self._all = _RetryBucket(rate, burst, now=0.0)
        self._rate, self._burst = rate * _SHARE, max(1.0, burst * _SHARE)
        self._max_addresses = max_addresses
        self._by_address: OrderedDict[str, _RetryBucket] = OrderedDict()

    def enter(self, now: float, address: str, *, is_full: bool = False) -> float:
        """Admit a connection and return 0, or return in how many seconds, at most a minute, it is to retry.

        While the relay ``is_full``, none is admitted.

        A connection that the common bucket rejects has used the share of its address all the same: so one
        address can push back the retry times of all only so far.
        """
        bucket = self._bucket_of(address, now)
        return (bucket.enter(now) if bucket is not None else 0.0) or self._all.enter(now, is_full=is_full)

    def _bucket_of(self, address: str, now: float) -> "_RetryBucket | None":
        """Return the bucket of an address; None for those that only the common one limits."""
        key = address_group(address)
        if key is None:
            return None
        bucket = self._by_address.get(key)
        if bucket is not None:
            self._by_address.move_to_end(key)
        elif evict_idle(self._by_address, self._max_addresses, now):
            bucket = self._by_address[key] = _RetryBucket(self._rate, self._burst, now)
        return bucket


class _RetryBucket:
    """One token bucket, and the retry times that it has given."""

    __slots__ = ("_bucket", "_next_free", "_rate")

    def __init__(self, rate: float, burst: float, now: float) -> None:
        self._rate = rate
        self._bucket = TokenBucket(rate, burst, now)
        self._next_free = 0.0

    def enter(self, now: float, *, is_full: bool = False) -> float:
        if not is_full and self._bucket.take(now) == 0:
            return 0.0
        wait_s = max(0.0, self._next_free - now) + 1 / self._rate
        # At most that, however many connect: once they are gone, their retry times delay no other node.
        wait_s = min(wait_s, LONGEST_WAIT_S)
        self._next_free = now + wait_s
        return wait_s

    def is_idle(self, now: float) -> bool:
        """Return whether a new one would be equal."""
        return self._next_free <= now and self._bucket.is_full(now)
