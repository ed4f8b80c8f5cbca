"""How long to wait before connecting again: exponential, with full jitter, 1 s to 30 s.

The relay limits the rate of reconnects by itself, so a node need not wait longer than that. A wait that the
relay requests is honoured up to ten minutes: a dishonest relay must not suspend a node for a day. Must not
wait by itself.
"""

import random

FIRST_S = 1.0
LONGEST_S = 30.0
LONGEST_REQUESTED_S = 600.0


class Backoff:
    """The waits between attempts that fail, drawn below a ceiling that doubles to ``longest_s``."""

    def __init__(self, rng: random.Random, first_s: float = FIRST_S, longest_s: float = LONGEST_S) -> None:
        self._rng = rng
        self._first_s = first_s
        self._longest_s = longest_s
        self._ceiling_s = first_s

    def reset(self) -> None:
        """Start over: an attempt has succeeded."""
        self._ceiling_s = self._first_s

    def next_s(self, at_least_s: float = 0.0) -> float:
        """Return the next wait in seconds, no shorter than what the other side has requested."""
        if at_least_s > 0:
            # Thousands that got the same wait must still not reconnect in the same moment.
            return min(at_least_s, LONGEST_REQUESTED_S - FIRST_S) + self._rng.uniform(0, FIRST_S)
        wait = self._rng.uniform(0, self._ceiling_s)
        self._ceiling_s = min(self._ceiling_s * 2, self._longest_s)
        return wait


class RivalBackoff:
    """The waits of one of two machines with the same identity, each of which displaces the other.

    Each of them succeeds whenever it connects, so success is no reason to start over: the waits double from
    ``first_s`` to ``longest_s`` until a connection has held for longer than that. A rival that still waited
    would have come by then.
    """

    def __init__(self, first_s: float, longest_s: float) -> None:
        self._first_s = first_s
        self._longest_s = longest_s
        self._next_s = first_s

    def displaced(self, held_s: float) -> float:
        """Return the wait after a connection that held for ``held_s`` seconds until the rival took it."""
        wait = self._first_s if held_s > self._longest_s else self._next_s
        self._next_s = min(wait * 2, self._longest_s)
        return wait
