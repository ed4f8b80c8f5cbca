"""Which relays run, by the leases that each renews in the presence bucket.

Time counts only while the bucket is read, which this relay's own lease shows: that none was read, as while
the servers elect a leader, says nothing of the other relays. Must not know of nodes, and must not do I/O.
"""

from collections.abc import Callable

LEASE_INTERVAL_S = 2.0
LEASE_S = 7.5
"""How long a relay counts as running after the last sign of it, while leases are read.

With the interval it is below the 10 s after which the end of a relay is known to the others.
"""
_LONGEST_STEP_S = 1.5 * LEASE_INTERVAL_S
"""What counts at most between two of this relay's own leases: without them, the bucket was not read."""


class RelayLeases:
    """The leases of a fleet's relays, as one of them has read them. ``monotonic`` is in seconds."""

    def __init__(self, monotonic: Callable[[], float]) -> None:
        self._monotonic = monotonic
        # How long the bucket was read so far, by this relay's own leases.
        self._read_s = 0.0
        # That time at the last lease of each other relay.
        self._others: dict[str, float] = {}
        # Those that have ended: entries of their nodes stay in the bucket, and are read again.
        self._ended: set[str] = set()
        # That time when each of them ended, until it is taken.
        self._ended_s: dict[str, float] = {}
        self._own_s: float | None = None

    @property
    def was_read(self) -> bool:
        """Whether this relay's own lease was ever read."""
        return self._own_s is not None

    def was_read_within(self, seconds: float) -> bool:
        """Return whether this relay's own lease was read in the last ``seconds``."""
        return self._own_s is not None and self._monotonic() - self._own_s < seconds

    def is_running(self, relay: str) -> bool:
        """Return whether the lease of another relay lasts."""
        read_s = self._others.get(relay)
        return read_s is not None and self._read_s - read_s < LEASE_S

    def running(self) -> list[str]:
        """Return the other relays whose leases last."""
        return [relay for relay in self._others if self.is_running(relay)]

    def known(self) -> list[str]:
        """Return the other relays that have not ended."""
        return list(self._others)

    def age_s(self, relay: str) -> float:
        """Return how long the bucket was read since the last lease of another relay, which is known."""
        return self._read_s - self._others[relay]

    def presume_running(self, relay: str) -> None:
        """Let a relay count as running whose lease was not read yet, unless it is known to have ended."""
        if relay not in self._ended:
            self._others.setdefault(relay, self._read_s)

    def own_renewed(self) -> list[str]:
        """Take in this relay's own lease; return the others whose leases have ended."""
        now_s = self._monotonic()
        if self._own_s is not None:
            self._read_s += min(now_s - self._own_s, _LONGEST_STEP_S)
        self._own_s = now_s
        return [relay for relay in self._others if not self.is_running(relay)]

    def renewed(self, relay: str) -> bool:
        """Take in another relay's lease; return whether it was not running before."""
        was_running = self.is_running(relay)
        self._others[relay] = self._read_s
        self._ended.discard(relay)
        self._ended_s.pop(relay, None)
        return not was_running

    def end(self, relay: str) -> bool:
        """Forget the lease of another relay; return whether there was one."""
        if self._others.pop(relay, None) is None:
            return False
        self._ended.add(relay)
        self._ended_s[relay] = self._read_s
        return True

    def take_ended(self, seconds: float) -> set[str]:
        """Return, once, the relays that ended ``seconds`` ago or earlier, counted while leases were read."""
        due = {relay for relay, ended_s in self._ended_s.items() if self._read_s - ended_s >= seconds}
        for relay in due:
            del self._ended_s[relay]
        return due
