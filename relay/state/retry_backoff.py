"""How long a failing work waits before it is tried again: twice as long each time, in part by chance.

By chance, so that relays that failed at one moment do not all return at one. Must not sleep.
"""

from collections.abc import Callable


class RetryBackoff:
    """Waits from ``first_s`` up to ``longest_s``, in seconds. ``chance`` is uniform in [0, 1)."""

    def __init__(self, first_s: float, longest_s: float, chance: Callable[[], float]) -> None:
        self._first_s = self._next_s = first_s
        self._longest_s = longest_s
        self._chance = chance

    def wait_s(self) -> float:
        """Return the next wait: between half of its bound and all of it."""
        bound_s, self._next_s = self._next_s, min(2 * self._next_s, self._longest_s)
        return bound_s * (1 + self._chance()) / 2

    def reset(self) -> None:
        """Begin anew: it has worked."""
        self._next_s = self._first_s
