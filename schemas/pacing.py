"""How often something may be done: a rate limit as a token bucket, and a backoff after failures.

Times are arguments, in seconds of one clock. Must not sleep, and must not know what it limits.
"""

from collections.abc import Callable

_ROUNDING = 1e-6
"""The tolerance for rounding errors in sums of fractions."""


class TokenBucket:
    """``rate`` tokens a second, up to ``burst`` at once. Times are seconds of one clock."""

    __slots__ = ("_at", "_burst", "_rate", "_tokens")

    def __init__(self, rate: float, burst: float, now: float) -> None:
        self._rate = rate
        self._burst = burst
        self._tokens = burst
        self._at = now

    def take(self, now: float, cost: float = 1.0, kept: float = 0.0) -> float:
        """Take ``cost`` and return 0, or take nothing and return the seconds until it is available.

        It is taken only if ``kept`` is left.
        """
        self._fill(now)
        # A caller that waited the returned time must not be rejected again because of a rounding error.
        if self._tokens + _ROUNDING < cost + kept:
            return (cost + kept - self._tokens) / self._rate
        self._tokens -= cost
        return 0.0

    def is_full(self, now: float) -> bool:
        self._fill(now)
        return self._tokens >= self._burst

    def change(self, rate: float, burst: float) -> None:
        """Use another rate from now on; tokens already taken are not given back."""
        self._rate, self._burst = rate, burst
        self._tokens = min(self._tokens, burst)

    def _fill(self, now: float) -> None:
        # A clock that is set back adds no tokens.
        passed = max(0.0, now - self._at)
        self._at = now
        self._tokens = min(self._burst, self._tokens + passed * self._rate)


def half_by_chance(chance: Callable[[], float]) -> Callable[[float], float]:
    """Return a ``Backoff``'s ``drawn``: at least half of each bound. ``chance`` is uniform in [0, 1)."""
    return lambda bound_s: bound_s * (1 + chance()) / 2


class Backoff:
    """Waits from ``first_s`` up to ``longest_s``, in seconds.

    ``drawn`` draws each wait below its bound, so that many that failed at one moment do not all return at
    one; without it a wait is its bound.
    """

    def __init__(
        self, first_s: float, longest_s: float, drawn: Callable[[float], float] = lambda bound_s: bound_s
    ) -> None:
        self._first_s = self._bound_s = first_s
        self._longest_s = longest_s
        self._drawn = drawn

    def next_s(self) -> float:
        bound_s, self._bound_s = self._bound_s, min(2 * self._bound_s, self._longest_s)
        return self._drawn(bound_s)

    def reset(self) -> None:
        self._bound_s = self._first_s
