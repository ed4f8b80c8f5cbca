"""A clock that stands still until it is told to move."""

import itertools
from collections.abc import Callable


class FakeClock:
    """Stands for the time in milliseconds since the epoch wherever a ``now_ms`` callable is asked for."""

    def __init__(self, now_ms: int) -> None:
        self.now_ms = now_ms

    def __call__(self) -> int:
        return self.now_ms

    def advance(self, ms: int) -> int:
        """Let ``ms`` milliseconds pass (negative: set the clock back) and return the new time."""
        self.now_ms += ms
        return self.now_ms


def hurried_ticks() -> Callable[[], int]:
    """Return milliseconds of which ten seconds pass between any two looks: nobody has to wait for a turn."""
    return itertools.count(0, 10_000).__next__
