"""Randomness that is always the same."""

import random

from schemas.pacing import Backoff


class FixedChance(random.Random):
    """Stands for ``random.Random``: every draw falls on the same share of its range."""

    def __init__(self, share: float) -> None:
        super().__init__()
        self._share = share

    def random(self) -> float:
        return self._share


def short_waits() -> Backoff:
    """Return a backoff whose every wait is as short as it can be."""
    return Backoff(1.0, 30.0, lambda _: 0.0)
