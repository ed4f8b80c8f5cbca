"""Randomness that is always the same."""

import random


class FixedChance(random.Random):
    """Stands for ``random.Random``: every draw falls on the same share of its range."""

    def __init__(self, share: float) -> None:
        super().__init__()
        self._share = share

    def random(self) -> float:
        return self._share
