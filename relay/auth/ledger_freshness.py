"""Whether the relay knows what the operator has decided: when each ledger was last read.

A relay that cannot read a ledger cannot know of a revocation, nor that a label now is another node's, so it
must refuse calls. A disk that hangs
raises no error, so the age of the last successful read counts. Must not read anything.
"""

import math
from collections.abc import Callable, Iterable

LIMIT_S = 3.0
LEAVES, TOKENS, KEYS, NAMES, SHARED = "leaves", "tokens", "token keys", "names", "shared"
"""The CA's ledger, the list of revoked tokens, the keys of tokens, the ledger of nodes' labels and tags, and
what other relays of the fleet have sent: that counts as read while all of it is understood, without a
connection too."""
SOURCES = (LEAVES, TOKENS, KEYS, NAMES, SHARED)


class Freshness:
    """When each of ``sources`` was last read, on a monotonic clock. None is fresh before its first read."""

    def __init__(
        self, sources: Iterable[str], monotonic: Callable[[], float], limit_s: float = LIMIT_S
    ) -> None:
        self._monotonic = monotonic
        self._limit_s = limit_s
        self._read_at = dict.fromkeys(sources, -math.inf)

    def read(self, source: str) -> None:
        """Record that ``source`` was read, or was found unchanged."""
        self._read_at[source] = self._monotonic()

    def is_fresh(self) -> bool:
        """Return whether every source was read within the limit."""
        return min(self._read_at.values()) > self._monotonic() - self._limit_s
