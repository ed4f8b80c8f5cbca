"""A rate as a token bucket, on a clock that comes in from outside.

Must not wait, nor know what it counts.
"""

_ROUNDING = 1e-6
"""What sums of fractions may be off by."""


class TokenBucket:
    """``rate`` a second, after ``burst`` at once. Times are seconds of one clock."""

    __slots__ = ("_at", "_burst", "_rate", "_tokens")

    def __init__(self, rate: float, burst: float, now: float) -> None:
        self._rate = rate
        self._burst = burst
        self._tokens = burst
        self._at = now

    def take(self, now: float, cost: float = 1.0) -> float:
        """Take ``cost`` and return 0, or take nothing and return in how many seconds it would be there."""
        self._fill(now)
        # A caller that waited as long as told must not be refused again for a rounding error.
        if self._tokens + _ROUNDING < cost:
            return (cost - self._tokens) / self._rate
        self._tokens -= cost
        return 0.0

    def is_full(self, now: float) -> bool:
        """Tell whether a new one would be no different."""
        self._fill(now)
        return self._tokens >= self._burst

    def change(self, rate: float, burst: float) -> None:
        """Go by another rate from now on; what has been used up stays used up."""
        self._rate, self._burst = rate, burst
        self._tokens = min(self._tokens, burst)

    def _fill(self, now: float) -> None:
        # A clock that goes back fills nothing.
        passed = max(0.0, now - self._at)
        self._at = now
        self._tokens = min(self._burst, self._tokens + passed * self._rate)
