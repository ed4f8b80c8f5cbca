"""What the presence bucket has of a node, and what is known by it of another relay.

Must not read the bucket.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

ENDED_KEPT_S = 7 * 86_400
"""How long the servers keep the entry of a session that has ended: longer than keys of calls last, and than a
relay that the others have ended is cut off from them while it holds the session."""
_SURELY_DROPPED_S = ENDED_KEPT_S + 3_600.0


@dataclass(frozen=True, slots=True)
class NodeEntry:
    """What the bucket has of one node: the ``session_id`` that began last, at which ``relay``."""

    relay: str
    session_id: str
    connected: bool
    revision: int


@dataclass(slots=True)
class HeldSession:
    """A session of this relay, and the revision of its entry once that is written."""

    session_id: str
    revision: int | None = None


@dataclass(frozen=True, slots=True)
class OtherRelay:
    """Another relay that runs.

    Attributes:
        nodes: how many are connected to it.
        seen_s: how long ago its lease was renewed, in seconds in which leases were read.
    """

    relay: str
    nodes: int
    seen_s: float


class EndedEntries:
    """Which entries of ended sessions were read, until the servers have surely dropped them."""

    def __init__(self, monotonic: Callable[[], float]) -> None:
        self._monotonic = monotonic
        # When each was read, the oldest first.
        self._read_s: dict[str, float] = {}

    def seen(self, node_id: str, *, has_ended: bool) -> None:
        """Take in an entry of a node."""
        self._read_s.pop(node_id, None)
        if has_ended:
            self._read_s[node_id] = self._monotonic()

    def take_dropped(self) -> Iterator[str]:
        """Yield the nodes whose entries are there no longer, and forget them."""
        until_s = self._monotonic() - _SURELY_DROPPED_S
        while self._read_s:
            node_id, read_s = next(iter(self._read_s.items()))
            if read_s > until_s:
                return
            del self._read_s[node_id]
            yield node_id

    def clear(self) -> None:
        """Forget all: they are read again."""
        self._read_s.clear()
