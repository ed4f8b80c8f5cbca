"""Which relay each node is connected to, as the presence bucket says, and what follows from that here.

For lists, and to settle which of two sessions of a node is newer: by the revision of the entry, which the
servers give, and never by a time. Must not be read to route a call, and must not do I/O: ``presence_bucket``
reads and writes the bucket.
"""

from collections.abc import Callable
from dataclasses import dataclass

from relay.routing.port import NodeRef

LEASE_INTERVAL_S = 2.5
LEASE_S = 8.0
"""How long a relay counts as running after the last sign of it: three leases and the way of one."""


@dataclass(frozen=True, slots=True)
class NodeEntry:
    """What the bucket has of one node: the ``session_id`` that began last, at which ``relay``."""

    relay: str
    session_id: str
    connected: bool
    revision: int


@dataclass(frozen=True, slots=True)
class Effects:
    """What presence changes in this relay.

    Attributes:
        let_go: ends the session of a node that has a newer one elsewhere.
        show: shows in the lists whether a node is connected elsewhere; False if it is not known yet.
        moved: takes in that another relay may have sent commands to a node.
    """

    let_go: Callable[[str], None]
    show: Callable[[str, bool], bool]
    moved: Callable[[str], None]


@dataclass(slots=True)
class _Held:
    """A session of this relay, and the revision of its entry once that is written."""

    session_id: str
    revision: int | None = None


class Presence:
    """The nodes of all relays, as ``relay`` knows them. ``monotonic`` is in seconds.

    Attributes:
        to_write: the nodes whose entries are to be written.
    """

    def __init__(self, relay: str, effects: Effects, monotonic: Callable[[], float]) -> None:
        self._relay = relay
        self._effects = effects
        self._monotonic = monotonic
        self._bucket: str | None = None
        self._held: dict[str, _Held] = {}
        # The entries that this relay has written, of sessions that go on or whose end is still to be written.
        self._written: dict[str, NodeEntry] = {}
        self._entries: dict[str, NodeEntry] = {}
        self._leases: dict[str, float] = {}
        self._shown: set[str] = set()
        self._not_shown_yet: set[str] = set()
        self.to_write: set[str] = set()

    @property
    def is_current(self) -> bool:
        """Whether what others write arrives: this relay's own lease has."""
        return self._is_running(self._relay)

    def relays(self) -> int:
        """Return how many relays run, this one included."""
        return sum(map(self._is_running, self._leases.keys() | {self._relay}))

    def nodes_elsewhere(self) -> int:
        """Return how many nodes are connected to other relays."""
        return len(self._shown)

    # --- what happens here

    def connection_changed(self, node: NodeRef, connected: bool) -> None:  # noqa: FBT001 - a ConnectionHandler
        """Take in that a node has connected to this process, or is lost."""
        node_id = node.node_id
        self.to_write.add(node_id)
        if not connected:
            self._held.pop(node_id, None)
            self._show(node_id)
            return
        before = self._entries.get(node_id)
        if not self.is_current or (before is not None and before.relay != self._relay):
            self._effects.moved(node_id)
        self._held[node_id] = _Held(node.session_id)
        self._shown.discard(node_id)
        self._not_shown_yet.discard(node_id)

    def entry_to_write(self, node_id: str) -> tuple[NodeEntry, int | None] | None:
        """Return the entry that is due, and the revision that it may replace alone; None if none is due.

        A session that has begun replaces whatever is there. One that has ended replaces its own entry alone.
        """
        held, written = self._held.get(node_id), self._written.get(node_id)
        if held is not None:
            return NodeEntry(self._relay, held.session_id, connected=True, revision=0), None
        if written is None:
            return None
        return NodeEntry(self._relay, written.session_id, connected=False, revision=0), written.revision

    def written(self, node_id: str, entry: NodeEntry) -> None:
        """Take in that ``entry`` was written, with the revision that it has got."""
        if not entry.connected:
            self._written.pop(node_id, None)
            return
        self._written[node_id] = entry
        held = self._held.get(node_id)
        if held is None or held.session_id != entry.session_id:
            self.to_write.add(node_id)  # it has ended meanwhile
            return
        held.revision = entry.revision
        self._settle(node_id)

    def replaced(self, node_id: str) -> None:
        """Take in that another relay's entry has replaced the one that was written here."""
        self._written.pop(node_id, None)

    # --- what the bucket says

    def begin(self, bucket: str) -> None:
        """Read ``bucket`` from its beginning. One that was made anew has none of the former revisions."""
        if bucket != self._bucket:
            self._written.clear()
            self._entries.clear()
            for held in self._held.values():
                held.revision = None
        self._bucket = bucket
        self.to_write |= {node_id for node_id, held in self._held.items() if held.revision is None}

    def node_seen(self, node_id: str, entry: NodeEntry | None) -> None:
        """Take in the entry of a node; None if it was removed."""
        if entry is None:
            self._entries.pop(node_id, None)
        else:
            self._entries[node_id] = entry
            # A relay whose lease has not been read yet may be running.
            self._leases.setdefault(entry.relay, self._monotonic())
            self._settle(node_id)
        self._show(node_id)

    def relay_seen(self, relay: str) -> None:
        """Take in a lease that was renewed."""
        was_running = self._is_running(relay)
        self._leases[relay] = self._monotonic()
        if not was_running:
            self._show_nodes_of(relay)

    def relay_gone(self, relay: str) -> None:
        """Take in that a relay has given up its lease."""
        if relay != self._relay and self._leases.pop(relay, None) is not None:
            self._show_nodes_of(relay)

    def sweep(self) -> None:
        """End the leases that were not renewed, and show what could not be shown before."""
        for relay in [other for other in self._leases if not self._is_running(other)]:
            self.relay_gone(relay)
        waiting, self._not_shown_yet = self._not_shown_yet, set()
        for node_id in waiting:
            self._show(node_id)

    def _settle(self, node_id: str) -> None:
        """Let the older of two sessions go: this relay's, if another has an entry of a later revision."""
        entry, held = self._entries.get(node_id), self._held.get(node_id)
        if entry is None or entry.relay == self._relay or held is None:
            return
        if held.revision is not None and entry.revision > held.revision:
            self._effects.let_go(node_id)
        else:
            # The other relay had the node before: what it has sent is not known here.
            self._effects.moved(node_id)

    def _show(self, node_id: str) -> None:
        if node_id in self._held:
            return  # the sessions of this relay show it
        entry = self._entries.get(node_id)
        connected = (
            entry is not None
            and entry.connected
            and entry.relay != self._relay
            and self._is_running(entry.relay)
        )
        if connected == (node_id in self._shown):
            return
        if not self._effects.show(node_id, connected):
            self._not_shown_yet.add(node_id)
        elif connected:
            self._shown.add(node_id)
        else:
            self._shown.discard(node_id)

    def _show_nodes_of(self, relay: str) -> None:
        for node_id, entry in self._entries.items():
            if entry.relay == relay:
                self._show(node_id)

    def _is_running(self, relay: str) -> bool:
        seen_s = self._leases.get(relay)
        return seen_s is not None and self._monotonic() - seen_s < LEASE_S
