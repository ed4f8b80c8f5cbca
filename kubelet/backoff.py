"""How long to wait before connecting again: exponential, with full jitter, 1 s to 30 s.

The relay limits the rate of reconnects by itself, so a node need not wait longer than that. A wait that the
relay requests is honoured up to ten minutes: a dishonest relay must not suspend a node for a day. Must not
wait by itself.
"""

import random

from schemas.backoff import Backoff

FIRST_S = 1.0
LONGEST_S = 30.0
LONGEST_REQUESTED_S = 600.0


class NodeBackoff(Backoff):
    """The waits between attempts that fail, each drawn below its whole bound."""

    def __init__(self, rng: random.Random, first_s: float = FIRST_S, longest_s: float = LONGEST_S) -> None:
        super().__init__(first_s, longest_s, lambda bound_s: rng.uniform(0, bound_s))
        self._rng = rng

    def next_s(self, at_least_s: float = 0.0) -> float:
        """Return the next wait in seconds, no shorter than what the other side has requested."""
        if at_least_s > 0:
            # Thousands that got the same wait must still not reconnect in the same moment.
            return min(at_least_s, LONGEST_REQUESTED_S - FIRST_S) + self._rng.uniform(0, FIRST_S)
        return super().next_s()
