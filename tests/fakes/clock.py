"""A clock that runs only when a test advances or sets it."""

import itertools
from collections.abc import Callable
from typing import Any


class FakeClock:
    """Stands for the time in milliseconds since the epoch wherever a ``now_ms`` callable is asked for."""

    def __init__(self, now_ms: int) -> None:
        self.now_ms = now_ms
        self._set_by_ms = 0

    def __call__(self) -> Any:  # it stands for clocks of every type
        return self.now_ms

    def advance(self, ms: int) -> int:
        """Let ``ms`` milliseconds pass (negative: set the clock back) and return the new time."""
        self.now_ms += ms
        return self.now_ms

    def step(self, ms: int) -> None:
        """Set the clock by ``ms`` milliseconds while no time passes."""
        self.now_ms += ms
        self._set_by_ms += ms

    def ticks_ms(self) -> int:
        """Return the time as a clock has it that cannot be set."""
        return self.now_ms - self._set_by_ms


def hurried_ticks() -> Callable[[], int]:
    """Return a clock that advances ten seconds at each reading, so that no rate limit delays the caller."""
    return itertools.count(0, 10_000).__next__
