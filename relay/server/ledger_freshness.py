"""Whether the relay knows what the operator has decided: when each ledger was last read.

A relay that cannot read a ledger cannot know of a revocation, nor that a label now is another node's, so it
must refuse calls. A disk that hangs raises no error, so the age of the last successful read counts. Must not
read anything.
"""

import math
from collections.abc import Callable, Iterable

from relay.auth.watched_keys import WatchedKeys
from relay.auth.watched_tokens import WatchedTokens
from relay.fleet.watched_names import WatchedNames
from relay.pki.watched_join_tokens import WatchedJoinTokens
from relay.server.watched_leaves import WatchedLeaves
from schemas.health import Health

LIMIT_S = 3.0
SHARED = "shared"
"""What other relays of the fleet have sent: that counts as read while all of it is understood, without a
connection too."""
SOURCES = (
    WatchedLeaves.name,
    WatchedTokens.name,
    WatchedJoinTokens.name,
    WatchedKeys.name,
    WatchedNames.name,
    SHARED,
)


class Freshness:
    """When each of ``sources`` was last read, on a monotonic clock. None is fresh before its first read."""

    def __init__(self, sources: Iterable[str], monotonic: Callable[[], float]) -> None:
        self._monotonic = monotonic
        self._read_at = dict.fromkeys(sources, -math.inf)

    def read(self, source: str) -> None:
        """Record that ``source`` was read, or was found unchanged."""
        self._read_at[source] = self._monotonic()

    def is_fresh(self) -> bool:
        """Return whether every source was read within the limit."""
        return min(self._read_at.values()) > self._monotonic() - LIMIT_S

    def health(self) -> Health:
        """Calls are refused while it is not known which tokens and leaves are revoked."""
        return Health.passive(ready=self.is_fresh())
