"""Which relay each node is connected to, as the presence bucket says, and what follows from that here.

For lists, and to settle which of two sessions of a node is newer: by the revision of the entry, which the
servers give, and never by a time. Which relays run follows from the leases that each renews in the bucket.
Time counts only while the bucket is read, which this relay's own lease shows: that none was read, as while
the servers elect a leader, says nothing of the other relays. Must not be read to route a call, and must not
do I/O: ``presence_bucket`` reads and writes the bucket.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace

from attrs import define, field

from relay.routing.port import NodeRef
from schemas.payloads import OpenFinding

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


@define(eq=False, repr=False)
class EndedEntries:
    """Which entries of ended sessions were read, until the servers have surely dropped them."""

    _monotonic: Callable[[], float]
    # When each was read, the oldest first.
    _read_s: dict[str, float] = field(init=False, factory=dict)

    def seen(self, node_id: str, *, has_ended: bool) -> None:
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
        self._read_s.clear()


@dataclass(frozen=True, slots=True)
class Effects:
    """What presence changes in this relay.

    Attributes:
        end_superseded: ends the session of a node that has a newer one at the relay that is named.
        show: shows in the lists whether a node is connected elsewhere; False if it is not known yet.
        moved: notes that another relay may have sent commands to a node.
        found: takes what a node that is connected elsewhere has reported to be wrong with it.
        history_unknown: notes whether that is still to be found out: the session's entry is not written.
    """

    end_superseded: Callable[[str, str], None]
    show: Callable[[str, bool], bool]
    moved: Callable[[str], None]
    history_unknown: Callable[[str, bool], None]
    found: Callable[[str, Sequence[OpenFinding]], None] = lambda _node_id, _findings: None


ElsewhereHandler = Callable[[str, NodeEntry | None], None]
"""Is called with the entry of a node that has connected to another relay, and with None when it is lost."""


LEASE_INTERVAL_S = 2.0
LEASE_S = 7.5
"""How long a relay counts as running after the last sign of it, while leases are read.

With the interval it is below the 10 s after which the end of a relay is known to the others.
"""
_LONGEST_STEP_S = 1.5 * LEASE_INTERVAL_S
"""What counts at most between two of this relay's own leases: without them, the bucket was not read."""


@define(eq=False, repr=False)
class RelayLeases:
    """The leases of a fleet's relays, as one of them has read them. ``monotonic`` is in seconds."""

    _monotonic: Callable[[], float]
    # How long the bucket was read so far, by this relay's own leases.
    _read_s: float = field(init=False, default=0.0)
    # That time at the last lease of each other relay.
    _others: dict[str, float] = field(init=False, factory=dict)
    # That time when each ended of those whose nodes may have entries in the bucket, which are read again.
    _ended: dict[str, float] = field(init=False, factory=dict)
    # That time when each of them ended, until it is taken.
    _ended_s: dict[str, float] = field(init=False, factory=dict)
    _own_s: float | None = field(init=False, default=None)

    @property
    def was_read(self) -> bool:
        return self._own_s is not None

    def was_read_within(self, seconds: float) -> bool:
        return self._own_s is not None and self._monotonic() - self._own_s < seconds

    def is_running(self, relay: str) -> bool:
        read_s = self._others.get(relay)
        return read_s is not None and self._read_s - read_s < LEASE_S

    def running(self) -> list[str]:
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
        """Apply this relay's own lease; return the others whose leases have ended."""
        now_s = self._monotonic()
        if self._own_s is not None:
            self._read_s += min(now_s - self._own_s, _LONGEST_STEP_S)
        self._own_s = now_s
        # By then the entries of its nodes were ended by the others, and dropped by the servers.
        self._ended = {
            relay: ended_s
            for relay, ended_s in self._ended.items()
            if self._read_s - ended_s < _SURELY_DROPPED_S + KEYS_LAST_S
        }
        return [relay for relay in self._others if not self.is_running(relay)]

    def renewed(self, relay: str) -> bool:
        """Apply another relay's lease; return whether it was not running before."""
        was_running = self.is_running(relay)
        self._others[relay] = self._read_s
        self._ended.pop(relay, None)
        self._ended_s.pop(relay, None)
        return not was_running

    def end(self, relay: str) -> bool:
        """Forget the lease of another relay; return whether there was one."""
        if self._others.pop(relay, None) is None:
            return False
        self._ended[relay] = self._ended_s[relay] = self._read_s
        return True

    def take_ended(self, seconds: float) -> set[str]:
        """Return, once, the relays that ended ``seconds`` ago or earlier, counted while leases were read."""
        due = {relay for relay, ended_s in self._ended_s.items() if self._read_s - ended_s >= seconds}
        for relay in due:
            del self._ended_s[relay]
        return due


KEYS_LAST_S = 600.0
"""How long another relay may keep the key of a call: as long as ``relay.calls`` does."""
UNREAD_S = 30.0
"""How long the nodes of others are shown while the bucket is not read: the time in which servers heal."""


@define(eq=False, repr=False)
class Presence:
    """The nodes of all relays, as ``relay`` knows them. ``monotonic`` is in seconds.

    Attributes:
        to_write: the nodes whose entries are to be written.
    """

    _relay: str
    _effects: Effects
    _monotonic: Callable[[], float]
    _leases: RelayLeases = field(init=False)
    _bucket: str | None = field(init=False, default=None)
    _keys_last_until: float = field(init=False)
    _held: dict[str, HeldSession] = field(init=False, factory=dict)
    # The entries that this relay has written, of sessions that go on or whose end is still to be written.
    _written: dict[str, NodeEntry] = field(init=False, factory=dict)
    _entries: dict[str, NodeEntry] = field(init=False, factory=dict)
    _ended: EndedEntries = field(init=False)
    # The newest revision of each node's entry, also of one that was removed or could not be read.
    _revisions: dict[str, int] = field(init=False, factory=dict)
    # Sessions whose entry could not replace the revision known here: a later one is about to be read.
    _behind: dict[str, int] = field(init=False, factory=dict)
    _shown: dict[str, NodeEntry] = field(init=False, factory=dict)
    _not_shown_yet: set[str] = field(init=False, factory=set)
    # What nodes have reported to be open, with the session in which they did.
    _findings: dict[str, tuple[str, Sequence[OpenFinding]]] = field(init=False, factory=dict)
    _on_elsewhere: list[ElsewhereHandler] = field(init=False, factory=list)
    _on_relay_gone: list[Callable[[str], None]] = field(init=False, factory=list)
    to_write: set[str] = field(init=False, factory=set)

    def __attrs_post_init__(self) -> None:
        self._leases = RelayLeases(self._monotonic)
        # Until then, keys may be in use of nodes whose entries a former bucket had.
        self._keys_last_until = self._monotonic()
        self._ended = EndedEntries(self._monotonic)

    def on_elsewhere(self, handler: ElsewhereHandler) -> None:
        """Call ``handler`` whenever a node that is shown connects to another relay, and when it is lost."""
        self._on_elsewhere.append(handler)

    def on_relay_gone(self, handler: Callable[[str], None]) -> None:
        self._on_relay_gone.append(handler)

    @property
    def is_current(self) -> bool:
        """Whether what others write arrives: this relay's own lease has."""
        return self._leases.was_read_within(LEASE_S)

    def relays(self) -> int:
        """Return how many relays run, this one included."""
        return self.is_current + len(self._leases.running())

    def others(self) -> Collection[str]:
        return self._leases.running()

    def other_relays(self) -> list[OtherRelay]:
        """Return what is known of the other relays that run, by their ids."""
        held = Counter(entry.relay for entry in self._entries.values() if entry.connected)
        return [OtherRelay(relay, held[relay], self._leases.age_s(relay)) for relay in sorted(self.others())]

    def nodes_elsewhere(self) -> int:
        return len(self._shown)

    def relay_of(self, node_id: str) -> str | None:
        """Return the relay that a node is connected to; None if it is connected to none that is known."""
        if node_id in self._held:
            return self._relay
        shown = self._shown.get(node_id)
        return shown.relay if shown is not None else None

    def holders(self, node_id: str) -> Sequence[str]:
        """Return the other relays that may hold a node: the one that is named first, since others may too."""
        named = self._entries.get(node_id)
        first = named.relay if named is not None and named.connected else ""
        return sorted(self.others(), key=lambda relay: relay != first)

    # --- what happens here

    def connection_changed(self, node: NodeRef, connected: bool) -> None:  # noqa: FBT001 - a ConnectionHandler
        node_id = node.node_id
        self.to_write.add(node_id)
        self._behind.pop(node_id, None)
        self._effects.history_unknown(node_id, connected)
        if not connected:
            self._held.pop(node_id, None)
            self._show(node_id)
            return
        if not self.is_current or self._may_come_from_another(node_id):
            self._effects.moved(node_id)
        self._held[node_id] = HeldSession(node.session_id)
        self._shown.pop(node_id, None)
        self._not_shown_yet.discard(node_id)

    def entry_to_write(self, node_id: str) -> tuple[NodeEntry, int] | None:
        """Return the entry that is due, and the revision that it may replace alone; None if none is due.

        Either replaces the newest entry that is known here, 0 for none, and so nothing that is not known: a
        write that was delayed until the node had gone to another relay changes nothing.
        """
        held, written = self._held.get(node_id), self._written.get(node_id)
        if held is not None:
            begun = NodeEntry(self._relay, held.session_id, connected=True, revision=0)
            return begun, self._newest_revision(node_id)
        left = written if written is not None else self._left_behind(node_id)
        return None if left is None else (replace(left, connected=False, revision=0), left.revision)

    def written(self, node_id: str, entry: NodeEntry) -> None:
        """Note that ``entry`` was written, with the revision that it has got."""
        if not entry.connected:
            self._written.pop(node_id, None)
            return
        self._written[node_id] = entry
        held = self._held.get(node_id)
        if held is None or held.session_id != entry.session_id:
            self.to_write.add(node_id)  # it has ended meanwhile
            return
        held.revision = entry.revision
        # It has replaced an entry that was known: all that had the node before are.
        self._effects.history_unknown(node_id, False)  # noqa: FBT003 - as ``Effects`` has it
        self._end_if_superseded(node_id)

    def write_conflicted(self, node_id: str, revision: int) -> None:
        """Note that ``revision`` could not be replaced, since another relay's entry has replaced it.

        A session that has begun is written again, at first as where there is no entry, for the servers drop
        those of ended sessions, and then once that entry has been read. The end of one need not be.
        """
        if node_id not in self._held:
            self._written.pop(node_id, None)
        elif self._newest_revision(node_id) > revision:
            self.to_write.add(node_id)
        elif revision:
            self._revisions.pop(node_id, None)
            self._written.pop(node_id, None)
            self.to_write.add(node_id)
        else:
            self._behind[node_id] = revision

    # --- what the bucket says

    def begin(self, bucket: str) -> None:
        """Read ``bucket`` from its beginning. One that was made anew has none of the former revisions."""
        if bucket != self._bucket:
            if self._bucket is not None:
                self._lost_entries()
            self._written.clear()
            for held in self._held.values():
                held.revision = None
        self._bucket = bucket
        self._entries.clear()
        self._findings.clear()
        self._revisions.clear()
        self._behind.clear()
        self._ended.clear()
        self.to_write |= {node_id for node_id, held in self._held.items() if held.revision is None}

    def all_read(self) -> None:
        """Note that every entry of the bucket was read once: nodes without one are nowhere."""
        for node_id in self._shown.keys() - self._entries.keys():
            self._show(node_id)
        self.to_write |= self._held.keys() - self._entries.keys()

    def gone_before(self, revision: int) -> set[tuple[str, int]]:
        """Return the entries of sessions that go on, if they have lower revisions than all in the bucket.

        Nothing but a purge removes them. One that was replaced a moment ago may be among them.
        """
        return {
            (node_id, entry.revision)
            for node_id, entry in self._entries.items()
            if entry.connected and entry.revision < revision
        }

    def node_seen(self, node_id: str, entry: NodeEntry | None, revision: int) -> None:
        """Apply the entry of a node, with its revision; None if it was removed, or is malformed."""
        self._revisions[node_id] = revision
        self._ended.seen(node_id, has_ended=entry is not None and not entry.connected)
        if revision > self._behind.get(node_id, revision):
            del self._behind[node_id]
            self.to_write.add(node_id)
        if entry is None:
            self._entries.pop(node_id, None)
            held = self._held.get(node_id)
            if held is not None and revision > (held.revision or 0):
                self._effects.moved(node_id)  # whose entry it was is not known
        else:
            self._entries[node_id] = entry
            if entry.relay == self._relay:
                held = self._held.get(node_id)
                if held is None:
                    if entry.connected:
                        self.to_write.add(node_id)  # the answer to the write was lost, and it has ended since
                elif not entry.connected and revision > (held.revision or revision):
                    self.to_write.add(node_id)  # it was ended by others, while this relay was away
            else:
                # A relay whose lease has not been read yet may be running.
                self._leases.presume_running(entry.relay)
                if node_id in self._held and not self._end_if_superseded(node_id):
                    # The other relay had the node before: what it has sent is not known here.
                    self._effects.moved(node_id)
        self._show(node_id)

    def findings_seen(self, node_id: str, session_id: str, findings: Sequence[OpenFinding]) -> None:
        """Note what a node has reported in a session, at another relay or here."""
        if findings:
            self._findings[node_id] = session_id, findings
        else:
            self._findings.pop(node_id, None)
        self._show_findings(node_id)

    def _show_findings(self, node_id: str) -> None:
        if (entry := self._shown.get(node_id)) is not None:
            session_id, findings = self._findings.get(node_id, ("", ()))
            self._effects.found(node_id, findings if session_id == entry.session_id else ())

    def relay_seen(self, relay: str) -> None:
        """Apply a lease that was renewed; with this relay's own, end those that were not."""
        if relay == self._relay:
            for ended in self._leases.own_renewed():
                self.relay_gone(ended)
            waiting, self._not_shown_yet = self._not_shown_yet, set()
            for node_id in waiting:
                self._show(node_id)
            self._tidy()
        elif self._leases.renewed(relay):
            self._show_nodes_of(relay)

    def relay_gone(self, relay: str) -> None:
        if self._leases.end(relay):
            self._show_nodes_of(relay)
            for handler in self._on_relay_gone:
                handler(relay)

    def forget_unread(self) -> None:
        """Show the nodes of this relay alone once the bucket was not read for too long."""
        if self._leases.was_read and not self._leases.was_read_within(UNREAD_S):
            for relay in self._leases.known():
                self.relay_gone(relay)

    def _left_behind(self, node_id: str) -> NodeEntry | None:
        """Return the entry of a node that was connected to a relay that has ended, and to none since."""
        entry = self._entries.get(node_id)
        if entry is None or not entry.connected or self._leases.is_running(entry.relay):
            return None
        return entry

    def _tidy(self) -> None:
        """End the entries that relays have left behind, and forget those that the servers have dropped."""
        # By then the keys of their calls have ended, and their nodes have connected elsewhere.
        if gone := self._leases.take_ended(KEYS_LAST_S):
            left = {node_id for node_id, entry in self._entries.items() if entry.relay in gone}
            self.to_write |= left - self._held.keys()
        for node_id in self._ended.take_dropped():
            self._entries.pop(node_id, None)
            self._revisions.pop(node_id, None)

    def _lost_entries(self) -> None:
        """Note that the bucket was lost, and with it which relays had the nodes before."""
        self._keys_last_until = self._monotonic() + KEYS_LAST_S
        for node_id, held in self._held.items():
            if held.revision is None:
                self._effects.moved(node_id)

    def _may_come_from_another(self, node_id: str) -> bool:
        """Return whether another relay may have had a node that connects."""
        if (before := self._entries.get(node_id)) is not None:
            return before.relay != self._relay
        # Its entry was removed or is not readable, or was lost with the bucket.
        return node_id in self._revisions or self._monotonic() < self._keys_last_until

    def _newest_revision(self, node_id: str) -> int:
        written = self._written.get(node_id)
        return max(self._revisions.get(node_id, 0), written.revision if written is not None else 0)

    def _end_if_superseded(self, node_id: str) -> bool:
        """Let the session of a node here go if another relay has an entry of a later revision."""
        entry, own = self._entries.get(node_id), self._held[node_id].revision
        if entry is None or entry.relay == self._relay or own is None or entry.revision < own:
            return False
        self._effects.end_superseded(node_id, entry.relay)
        return True

    def _show(self, node_id: str) -> None:
        if node_id in self._held:
            return  # the sessions of this relay show it
        entry = self._entries.get(node_id)
        if entry is not None and not (entry.connected and self._leases.is_running(entry.relay)):
            entry = None  # this relay's own, of a session that has ended, among them
        shown = self._shown.get(node_id)
        if entry == shown:
            return
        if (entry is None) != (shown is None) and not self._effects.show(node_id, entry is not None):
            self._not_shown_yet.add(node_id)
            return
        if entry is None:
            del self._shown[node_id]
        else:
            self._shown[node_id] = entry
            self._show_findings(node_id)
        for handler in self._on_elsewhere:
            handler(node_id, entry)

    def _show_nodes_of(self, relay: str) -> None:
        for node_id, entry in self._entries.items():
            if entry.relay == relay:
                self._show(node_id)
