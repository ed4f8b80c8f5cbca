"""What follows from the bucket's entries, one at a time, in the order in which they may come."""

from dataclasses import dataclass, field

import pytest

from relay.cluster.presence import UNREAD_S, Effects, Presence
from relay.cluster.presence_entries import NodeEntry
from relay.cluster.relay_leases import LEASE_INTERVAL_S, LEASE_S
from relay.routing.port import NodeRef
from tests.fakes.seconds import Seconds
from tests.fakes.signer import NODE_ID

OWN, OTHER, THIRD = "OWN", "OTHER", "THIRD"
BUCKET = "made at noon"


@dataclass
class Stage:
    """Presence in one relay, and what it changes there."""

    seconds: Seconds = field(default_factory=Seconds)
    let_go_of: list[str] = field(default_factory=list)
    shown: dict[str, bool] = field(default_factory=dict)
    moved: list[str] = field(default_factory=list)
    unsure: dict[str, bool] = field(default_factory=dict)
    known: bool = True
    is_read: bool = True

    def __post_init__(self) -> None:
        effects = Effects(self.let_go, self.show, self.moved.append, self.unsure.__setitem__)
        self.presence = Presence(OWN, effects, self.seconds)
        self.presence.begin(BUCKET)
        if self.is_read:
            self.presence.relay_seen(OWN)

    def show(self, node_id: str, connected: bool) -> bool:  # noqa: FBT001 - as ``Effects`` has it
        if self.known:
            self.shown[node_id] = connected
        return self.known

    def let_go(self, node_id: str) -> None:
        self.let_go_of.append(node_id)
        self.lose()

    def connect(self, session_id: str = "S1") -> None:
        self.presence.connection_changed(NodeRef("acme", NODE_ID, session_id), True)  # noqa: FBT003

    def lose(self, session_id: str = "S1") -> None:
        self.presence.connection_changed(NodeRef("acme", NODE_ID, session_id), False)  # noqa: FBT003

    def see(self, revision: int, relay: str = OTHER, *, connected: bool = True) -> None:
        self.presence.node_seen(NODE_ID, NodeEntry(relay, "S9", connected, revision), revision)

    def renew(self, seconds: float) -> None:
        """Let time pass, in which this relay's own lease comes back."""
        end = self.seconds.now + seconds
        while self.seconds.now < end:
            self.seconds.now += LEASE_INTERVAL_S
            self.presence.relay_seen(OWN)

    def due(self) -> tuple[NodeEntry, int] | None:
        """Return what is due to be written, if anything."""
        return self.presence.entry_to_write(NODE_ID) if NODE_ID in self.presence.to_write else None

    def write(self, revision: int) -> None:
        """Write the entry that is due, as the bucket does."""
        self.presence.to_write.discard(NODE_ID)
        wanted = self.presence.entry_to_write(NODE_ID)
        assert wanted is not None
        entry, _ = wanted
        self.presence.written(NODE_ID, NodeEntry(entry.relay, entry.session_id, entry.connected, revision))


@pytest.fixture
def stage() -> Stage:
    return Stage()


BEGUN = NodeEntry(OWN, "S1", connected=True, revision=0)
ENDED = NodeEntry(OWN, "S1", connected=False, revision=0)


def test_a_session_that_begins_replaces_the_entry_that_is_known(stage: Stage) -> None:
    stage.connect()
    assert stage.due() == (BEGUN, 0)
    stage.lose()
    stage.see(7)
    stage.connect()
    assert stage.due() == (BEGUN, 7)


def test_a_session_that_another_relay_has_outrun_is_written_after_that_was_read(stage: Stage) -> None:
    stage.connect()
    stage.presence.to_write.clear()
    stage.presence.outrun(NODE_ID, 0)
    assert stage.due() is None
    stage.see(7)
    assert stage.due() == (BEGUN, 7)


def test_what_was_read_before_the_failure_is_known_is_written_at_once(stage: Stage) -> None:
    stage.connect()
    stage.presence.to_write.clear()
    stage.see(7)
    stage.presence.outrun(NODE_ID, 0)
    assert stage.due() == (BEGUN, 7)


def test_a_session_that_was_outrun_and_has_ended_meanwhile_changes_nothing(stage: Stage) -> None:
    stage.connect()
    stage.lose()
    stage.presence.to_write.clear()
    stage.presence.outrun(NODE_ID, 0)
    stage.see(7)
    assert stage.due() is None
    assert stage.presence.entry_to_write(NODE_ID) is None


def test_an_entry_that_was_removed_is_replaced_too(stage: Stage) -> None:
    stage.connect()
    stage.presence.to_write.clear()
    stage.presence.outrun(NODE_ID, 0)
    stage.presence.node_seen(NODE_ID, None, 7)
    assert stage.due() == (BEGUN, 7)


def test_who_had_the_node_before_is_not_sure_until_its_entry_is_written(stage: Stage) -> None:
    stage.connect()
    assert stage.unsure == {NODE_ID: True}
    stage.presence.to_write.clear()
    stage.presence.outrun(NODE_ID, 0)
    stage.see(7)
    assert (stage.unsure, stage.moved) == ({NODE_ID: True}, [NODE_ID])
    stage.write(8)
    assert stage.unsure == {NODE_ID: False}


def test_a_node_that_is_lost_is_not_unsure_any_more(stage: Stage) -> None:
    stage.connect()
    stage.lose()
    assert stage.unsure == {NODE_ID: False}


def test_a_session_that_ends_replaces_its_own_entry_alone(stage: Stage) -> None:
    stage.connect()
    stage.write(7)
    stage.lose()
    assert stage.due() == (ENDED, 7)
    stage.presence.outrun(NODE_ID, 7)
    assert stage.presence.entry_to_write(NODE_ID) is None


def test_a_session_that_ended_before_it_was_written_is_written_as_ended_then(stage: Stage) -> None:
    stage.connect()
    wanted = stage.presence.entry_to_write(NODE_ID)
    assert wanted is not None
    stage.lose()
    stage.presence.to_write.clear()
    stage.presence.written(NODE_ID, NodeEntry(OWN, "S1", connected=True, revision=7))
    assert stage.due() == (ENDED, 7)


def test_the_older_session_is_let_go(stage: Stage) -> None:
    stage.connect()
    stage.write(7)
    stage.see(8)
    assert stage.let_go_of == [NODE_ID]
    assert stage.shown == {NODE_ID: True}  # it is connected there


def test_the_older_session_is_let_go_also_when_the_newer_has_ended_since(stage: Stage) -> None:
    stage.connect()
    stage.write(7)
    stage.see(8, connected=False)
    assert stage.let_go_of == [NODE_ID]
    assert stage.shown == {}


def test_the_newer_session_stays_and_knows_that_the_node_has_moved(stage: Stage) -> None:
    stage.connect()
    stage.write(8)
    stage.see(7)
    assert stage.let_go_of == []
    assert stage.moved == [NODE_ID]


def test_which_is_newer_is_settled_when_the_own_entry_has_its_revision(stage: Stage) -> None:
    stage.connect()
    stage.see(8)
    assert stage.let_go_of == []
    stage.write(7)
    assert stage.let_go_of == [NODE_ID]


def test_a_node_that_returns_from_another_relay_has_moved(stage: Stage) -> None:
    stage.see(7)
    stage.connect()
    assert stage.moved == [NODE_ID]


def test_a_node_has_moved_once_whether_its_entry_is_read_or_acknowledged_first(stage: Stage) -> None:
    stage.see(7)
    stage.connect()
    stage.write(8)
    stage.see(8, OWN)
    assert stage.moved == [NODE_ID]


def test_a_node_that_connects_again_here_has_not_moved(stage: Stage) -> None:
    stage.connect()
    stage.write(7)
    stage.see(7, OWN)
    stage.lose()
    stage.connect("S2")
    assert stage.moved == []


def test_a_session_that_is_resumed_after_another_relay_had_the_node_is_the_newer(stage: Stage) -> None:
    stage.connect()
    stage.write(7)
    stage.lose()
    stage.see(8)
    stage.connect()
    assert stage.let_go_of == []
    stage.write(9)
    stage.see(8)
    assert stage.let_go_of == []


def test_a_node_may_have_moved_while_the_bucket_was_not_read(stage: Stage) -> None:
    stage.seconds.now += LEASE_S
    assert not stage.presence.is_current
    stage.connect()
    assert stage.moved == [NODE_ID]


def test_a_node_elsewhere_is_shown_while_its_relay_runs(stage: Stage) -> None:
    stage.presence.relay_seen(OTHER)
    stage.see(7)
    assert stage.shown == {NODE_ID: True}
    assert (stage.presence.relays(), stage.presence.nodes_elsewhere()) == (2, 1)
    stage.renew(LEASE_S)
    assert stage.shown == {NODE_ID: False}
    assert (stage.presence.relays(), stage.presence.nodes_elsewhere()) == (1, 0)
    # It was only slow.
    stage.presence.relay_seen(OTHER)
    assert stage.shown == {NODE_ID: True}


def test_the_end_of_a_relay_is_known_within_ten_seconds(stage: Stage) -> None:
    stage.see(7)
    assert LEASE_S + LEASE_INTERVAL_S < 10
    stage.renew(LEASE_S + LEASE_INTERVAL_S)
    assert stage.shown == {NODE_ID: False}


def test_while_leases_are_not_read_none_ends(stage: Stage) -> None:
    stage.see(7)
    stage.seconds.now += 2 * LEASE_S
    assert not stage.presence.is_current
    # The servers have a leader again: this relay's lease comes back first, the other's a while later.
    stage.presence.relay_seen(OWN)
    stage.renew(LEASE_INTERVAL_S)
    assert stage.shown == {NODE_ID: True}
    stage.presence.relay_seen(OTHER)
    stage.renew(LEASE_INTERVAL_S)
    assert stage.shown == {NODE_ID: True}


def test_the_nodes_of_others_leave_the_lists_when_the_bucket_is_not_read_for_long(stage: Stage) -> None:
    stage.see(7)
    stage.seconds.now += UNREAD_S - 1
    stage.presence.forget_unread()
    assert stage.shown == {NODE_ID: True}
    stage.seconds.now += 1
    stage.presence.forget_unread()
    assert stage.shown == {NODE_ID: False}
    stage.presence.relay_seen(OTHER)
    assert stage.shown == {NODE_ID: True}


def test_what_was_read_before_the_first_own_lease_stays_in_the_lists() -> None:
    stage = Stage(is_read=False)
    stage.see(7)
    stage.presence.forget_unread()
    assert stage.shown == {NODE_ID: True}


def test_a_node_that_a_new_bucket_does_not_have_is_connected_nowhere(stage: Stage) -> None:
    stage.see(7)
    stage.presence.begin("made again")
    assert stage.shown == {NODE_ID: True}
    stage.presence.all_read()
    assert stage.shown == {NODE_ID: False}


def test_a_relay_that_ends_in_order_is_gone_at_once(stage: Stage) -> None:
    stage.see(7)
    stage.presence.relay_gone(OTHER)
    assert stage.shown == {NODE_ID: False}


def test_a_session_that_ends_elsewhere_is_shown_so(stage: Stage) -> None:
    stage.see(7)
    stage.see(8, connected=False)
    assert stage.shown == {NODE_ID: False}
    stage.see(9, THIRD)
    assert stage.shown == {NODE_ID: True}
    stage.presence.node_seen(NODE_ID, None, 10)
    assert stage.shown == {NODE_ID: False}


def test_an_own_entry_of_a_session_that_has_ended_shows_nothing(stage: Stage) -> None:
    stage.see(7, OWN)
    assert stage.shown == {}


def test_a_node_that_is_not_known_yet_is_shown_once_it_is(stage: Stage) -> None:
    stage.known = False
    stage.see(7)
    stage.presence.relay_seen(OWN)
    assert stage.shown == {}
    stage.known = True
    stage.presence.relay_seen(OWN)
    assert stage.shown == {NODE_ID: True}


def test_a_bucket_that_was_made_anew_is_written_again(stage: Stage) -> None:
    stage.connect()
    stage.write(700)
    stage.presence.begin(BUCKET)
    assert stage.presence.to_write == set()
    stage.presence.begin("made again")
    assert stage.presence.to_write == {NODE_ID}
    # Its revisions begin anew: a small one says nothing about the former.
    stage.see(3)
    assert stage.let_go_of == []
    stage.write(4)
    stage.see(3)
    assert stage.let_go_of == []
