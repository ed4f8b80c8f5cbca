"""How long what has failed waits before it is tried again: twice as long each time. Must not sleep."""

from collections.abc import Callable


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
        """Return the next wait."""
        bound_s, self._bound_s = self._bound_s, min(2 * self._bound_s, self._longest_s)
        return self._drawn(bound_s)

    def reset(self) -> None:
        """Begin anew: it has worked."""
        self._bound_s = self._first_s
