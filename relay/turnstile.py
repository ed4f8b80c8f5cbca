"""Lets nodes in at a rate that the relay bears, when thousands of them come back at once.

Whoever comes too soon is given an appointment, each another one, so that they do not all come again in the
same moment. Must not know who they are: that is found out behind it, and costs the most.
"""

from relay.limits import TokenBucket

RATE_PER_S = 200.0
BURST = 200.0
LONGEST_WAIT_S = 60.0


class Turnstile:
    """A token bucket that hands out times to come again. Times are seconds of one monotonic clock."""

    def __init__(self, rate: float = RATE_PER_S, burst: float = BURST) -> None:
        self._rate = rate
        self._bucket = TokenBucket(rate, burst, now=0.0)
        self._next_free = 0.0

    def enter(self, now: float) -> float:
        """Let one in and return 0, or return in how many seconds, at most a minute, it is to come again."""
        if self._bucket.take(now) == 0:
            return 0.0
        self._next_free = max(self._next_free, now) + 1 / self._rate
        return min(LONGEST_WAIT_S, self._next_free - now)
