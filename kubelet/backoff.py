"""How long to wait before connecting again: exponential, with full jitter, 1 s to 5 min.

Must not wait by itself.
"""

import random

FIRST_S = 1.0
LONGEST_S = 300.0


class Backoff:
    """The waits between attempts that fail."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._ceiling_s = FIRST_S

    def reset(self) -> None:
        """Start over: an attempt has succeeded."""
        self._ceiling_s = FIRST_S

    def next_s(self, at_least_s: float = 0.0) -> float:
        """Return the next wait in seconds, no shorter than what the relay has asked for."""
        if at_least_s > 0:
            # Asked for the same wait, thousands must still not return in the same moment.
            return at_least_s + self._rng.uniform(0, FIRST_S)
        wait = self._rng.uniform(0, self._ceiling_s)
        self._ceiling_s = min(self._ceiling_s * 2, LONGEST_S)
        return wait
