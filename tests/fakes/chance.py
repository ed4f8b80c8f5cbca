"""Randomness that is always the same."""

import random

from kubelet.backoff import NodeBackoff


class FixedChance(random.Random):
    """Stands for ``random.Random``: every draw falls on the same share of its range."""

    def __init__(self, share: float) -> None:
        super().__init__()
        self._share = share

    def random(self) -> float:
        return self._share


def short_waits() -> NodeBackoff:
    """Return a backoff whose every wait is as short as it can be."""
    return NodeBackoff(FixedChance(0.0))
