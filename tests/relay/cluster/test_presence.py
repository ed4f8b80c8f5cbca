"""What follows from the bucket's entries, one at a time, in the order in which they may come."""

from dataclasses import dataclass, field, replace

import pytest

from relay.auth.permissions import Rights
from relay.calls.idempotency import REMEMBERED_S
from relay.cluster.presence import (
    ENDED_KEPT_S,
    KEYS_LAST_S,
    LEASE_INTERVAL_S,
    LEASE_S,
    UNREAD_S,
    Effects,
    NodeEntry,
    Presence,
    RelayLeases,
)
from relay.fleet.fleet import GRACE_MS
from relay.fleet.node_record import Where
from relay.routing.port import NodeRef
from tests.fakes.hub import READ_ONLY, Hub
from tests.fakes.seconds import Seconds
from tests.fakes.signer import NODE_ID, TENANT

OWN, OTHER, THIRD = "OWN", "OTHER", "THIRD"
BUCKET = "made at noon"


@dataclass
class Stage:
    """Presence in one relay, and what it changes there."""

    seconds: Seconds = field(default_factory=Seconds)
    superseded: list[str] = field(default_factory=list)
    shown: dict[str, bool] = field(default_factory=dict)
    moved: list[str] = field(default_factory=list)
    history_unknown: dict[str, bool] = field(default_factory=dict)
    known: bool = True
    is_read: bool = True

    def __post_init__(self) -> None:
        effects = Effects(self.end_superseded, self.show, self.moved.append, self.history_unknown.__setitem__)
        self.presence = Presence(OWN, effects, self.seconds)
        self.presence.begin(BUCKET)
        if self.is_read:
            self.presence.relay_seen(OWN)

    def show(self, node_id: str, connected: bool) -> bool:  # noqa: FBT001 - as ``Effects`` has it
        if self.known:
            self.shown[node_id] = connected
        return self.known

    def end_superseded(self, node_id: str, relay: str) -> None:
        assert relay == OTHER
        self.superseded.append(node_id)
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

    def conflict(self, revision: int) -> None:
        """Have what is due not written, since the entry of ``revision`` is not there."""
        self.presence.to_write.clear()
        self.presence.write_conflicted(NODE_ID, revision)

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


def test_an_entry_that_was_written_unnoticed_of_a_session_that_has_ended_is_ended_once_it_is_read(
    stage: Stage,
) -> None:
    stage.connect()
    assert stage.due() == (BEGUN, 0)  # the servers take it, and their answer is lost with the connection
    stage.lose()
    stage.presence.begin(BUCKET)
    assert stage.due() is None  # the bucket is not read yet
    stage.presence.to_write.clear()
    stage.presence.node_seen(NODE_ID, replace(BEGUN, revision=7), 7)
    assert stage.due() == (ENDED, 7)


def test_a_session_that_another_relay_has_replaced_is_written_after_that_was_read(stage: Stage) -> None:
    stage.connect()
    stage.conflict(0)
    assert stage.due() is None
    stage.see(7)
    assert stage.due() == (BEGUN, 7)


def test_what_was_read_before_the_failure_is_known_is_written_at_once(stage: Stage) -> None:
    stage.connect()
    stage.see(7)
    stage.conflict(0)
    assert stage.due() == (BEGUN, 7)


def test_an_entry_that_the_servers_may_have_dropped_is_written_as_where_there_is_none(stage: Stage) -> None:
    stage.see(7, connected=False)
    stage.connect()
    assert stage.due() == (BEGUN, 7)
    stage.conflict(7)
    assert stage.due() == (BEGUN, 0)
    # There is one, so another relay has written it: it is on its way.
    stage.conflict(0)
    assert stage.due() is None
    stage.see(9)
    assert stage.due() == (BEGUN, 9)


def test_what_was_read_before_a_dropped_entry_was_missed_is_replaced(stage: Stage) -> None:
    stage.see(7, connected=False)
    stage.connect()
    stage.see(9)
    stage.conflict(7)
    assert stage.due() == (BEGUN, 9)


def test_an_ended_entry_is_forgotten_once_the_servers_have_surely_dropped_it(stage: Stage) -> None:
    stage.see(7, connected=False)
    stage.seconds.now += ENDED_KEPT_S
    stage.presence.relay_seen(OWN)
    stage.connect()
    assert stage.due() == (BEGUN, 7)
    stage.lose()
    stage.seconds.now += 3_600
    stage.presence.relay_seen(OWN)
    stage.moved.clear()
    stage.connect()
    assert stage.due() == (BEGUN, 0)
    assert stage.moved == []


def test_what_a_relay_has_left_behind_is_ended_by_the_others(stage: Stage) -> None:
    stage.see(7)
    stage.renew(KEYS_LAST_S)
    assert stage.due() is None
    stage.renew(LEASE_S + LEASE_INTERVAL_S)
    assert stage.due() == (NodeEntry(OTHER, "S9", connected=False, revision=0), 7)
    stage.write(8)
    stage.see(8, connected=False)
    stage.renew(KEYS_LAST_S)
    assert stage.due() is None


def test_a_relay_that_is_back_has_left_nothing_behind(stage: Stage) -> None:
    stage.see(7)
    stage.renew(KEYS_LAST_S)
    stage.presence.relay_seen(OTHER)
    stage.renew(KEYS_LAST_S)
    assert stage.due() is None
    assert stage.presence.entry_to_write(NODE_ID) is not None  # it has ended again, and not long ago


def test_what_a_relay_has_left_behind_and_a_node_has_replaced_here_is_not_ended(stage: Stage) -> None:
    stage.see(7)
    stage.renew(LEASE_S + LEASE_INTERVAL_S)
    stage.connect()
    stage.write(8)
    stage.renew(KEYS_LAST_S)
    assert stage.due() is None


def test_a_session_whose_entry_the_others_have_ended_is_written_again(stage: Stage) -> None:
    stage.connect()
    stage.write(7)
    stage.presence.node_seen(NODE_ID, NodeEntry(OWN, "S1", connected=False, revision=6), 6)
    assert stage.due() is None  # of the session before
    stage.presence.node_seen(NODE_ID, NodeEntry(OWN, "S1", connected=False, revision=8), 8)
    assert stage.due() == (BEGUN, 8)


def test_a_session_whose_entry_the_others_have_ended_and_the_servers_dropped_is_written_again(
    stage: Stage,
) -> None:
    stage.connect()
    stage.write(7)
    stage.presence.begin(BUCKET)
    stage.presence.all_read()
    assert stage.due() == (BEGUN, 7)


def test_a_session_that_was_replaced_and_has_ended_meanwhile_changes_nothing(stage: Stage) -> None:
    stage.connect()
    stage.lose()
    stage.conflict(0)
    stage.see(7)
    assert stage.due() is None
    assert stage.presence.entry_to_write(NODE_ID) is None


def test_an_entry_that_was_removed_is_replaced_too(stage: Stage) -> None:
    stage.connect()
    stage.conflict(0)
    stage.presence.node_seen(NODE_ID, None, 7)
    assert stage.due() == (BEGUN, 7)


def test_who_had_the_node_before_is_not_sure_until_its_entry_is_written(stage: Stage) -> None:
    stage.connect()
    assert stage.history_unknown == {NODE_ID: True}
    stage.conflict(0)
    stage.see(7)
    assert (stage.history_unknown, stage.moved) == ({NODE_ID: True}, [NODE_ID])
    stage.write(8)
    assert stage.history_unknown == {NODE_ID: False}


def test_of_a_node_that_is_lost_the_history_is_not_asked_for_any_more(stage: Stage) -> None:
    stage.connect()
    stage.lose()
    assert stage.history_unknown == {NODE_ID: False}


def test_a_session_that_ends_replaces_its_own_entry_alone(stage: Stage) -> None:
    stage.connect()
    stage.write(7)
    stage.lose()
    assert stage.due() == (ENDED, 7)
    stage.conflict(7)
    assert stage.presence.entry_to_write(NODE_ID) is None


def test_a_session_that_ended_before_it_was_written_is_written_as_ended_then(stage: Stage) -> None:
    stage.connect()
    wanted = stage.presence.entry_to_write(NODE_ID)
    assert wanted is not None
    stage.lose()
    stage.presence.to_write.clear()
    stage.presence.written(NODE_ID, NodeEntry(OWN, "S1", connected=True, revision=7))
    assert stage.due() == (ENDED, 7)


def test_the_older_session_is_ended(stage: Stage) -> None:
    stage.connect()
    stage.write(7)
    stage.see(8)
    assert stage.superseded == [NODE_ID]
    assert stage.shown == {NODE_ID: True}  # it is connected there


def test_the_older_session_is_ended_also_when_the_newer_has_ended_since(stage: Stage) -> None:
    stage.connect()
    stage.write(7)
    stage.see(8, connected=False)
    assert stage.superseded == [NODE_ID]
    assert stage.shown == {}


def test_the_newer_session_stays_and_knows_that_the_node_has_moved(stage: Stage) -> None:
    stage.connect()
    stage.write(8)
    stage.see(7)
    assert stage.superseded == []
    assert stage.moved == [NODE_ID]


def test_which_is_newer_is_settled_when_the_own_entry_has_its_revision(stage: Stage) -> None:
    stage.connect()
    stage.see(8)
    assert stage.superseded == []
    stage.write(7)
    assert stage.superseded == [NODE_ID]


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
    assert stage.superseded == []
    stage.write(9)
    stage.see(8)
    assert stage.superseded == []


def test_a_node_may_have_moved_while_the_bucket_was_not_read(stage: Stage) -> None:
    stage.seconds.now += LEASE_S
    assert not stage.presence.is_current
    stage.connect()
    assert stage.moved == [NODE_ID]


def test_a_node_whose_entry_was_removed_or_is_not_readable_may_have_moved(stage: Stage) -> None:
    stage.presence.node_seen(NODE_ID, None, 7)
    stage.connect()
    assert stage.moved == [NODE_ID]


def test_a_node_whose_entry_is_replaced_by_one_that_is_not_readable_may_have_moved(stage: Stage) -> None:
    stage.connect()
    stage.presence.node_seen(NODE_ID, None, 7)
    assert stage.moved == [NODE_ID]
    stage.write(8)
    stage.presence.node_seen(NODE_ID, None, 7)
    assert stage.moved == [NODE_ID]


def test_a_node_without_an_entry_in_a_bucket_made_anew_may_have_moved_for_the_life_of_a_key(
    stage: Stage,
) -> None:
    stage.presence.begin("made again")
    stage.renew(REMEMBERED_S - LEASE_INTERVAL_S)
    stage.connect()
    assert stage.moved == [NODE_ID]
    stage.lose()
    stage.renew(LEASE_INTERVAL_S)
    stage.connect("S2")
    assert stage.moved == [NODE_ID]


def test_a_node_whose_entry_the_former_bucket_did_not_get_may_have_moved(stage: Stage) -> None:
    stage.connect()
    stage.presence.begin("made again")
    assert stage.moved == [NODE_ID]


def test_a_node_that_stays_while_the_bucket_is_made_anew_has_not_moved(stage: Stage) -> None:
    stage.connect()
    stage.write(7)
    stage.presence.begin("made again")
    stage.write(1)
    assert stage.moved == []


def test_what_may_have_moved_is_so_for_as_long_as_keys_are_remembered() -> None:
    assert KEYS_LAST_S == REMEMBERED_S


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


def test_the_nodes_of_a_relay_that_has_ended_stay_so_when_all_is_read_again(stage: Stage) -> None:
    stage.see(7)
    stage.renew(LEASE_S)
    stage.presence.begin(BUCKET)
    stage.see(7)
    assert stage.shown == {NODE_ID: False}
    assert stage.presence.others() == []
    # Its lease ended because it was slow.
    stage.presence.relay_seen(OTHER)
    assert stage.shown == {NODE_ID: True}


def test_an_ended_relay_is_forgotten_once_the_servers_have_surely_dropped_the_entries_of_its_nodes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("relay.cluster.presence._SURELY_DROPPED_S", 2 * LEASE_S)
    monkeypatch.setattr("relay.cluster.presence.KEYS_LAST_S", LEASE_S)
    seconds = Seconds()
    leases = RelayLeases(seconds)
    leases.renewed(OTHER)
    assert leases.end(OTHER)
    presumed_after_s = None
    for turn in range(20):
        leases.own_renewed()
        leases.presume_running(OTHER)
        if presumed_after_s is None and leases.is_running(OTHER):
            presumed_after_s = turn * LEASE_INTERVAL_S
        seconds.now += LEASE_INTERVAL_S
    assert presumed_after_s is not None
    assert 3 * LEASE_S <= presumed_after_s < 3 * LEASE_S + LEASE_INTERVAL_S


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
    assert stage.superseded == []
    stage.write(4)
    stage.see(3)
    assert stage.superseded == []


# --- what a relay lists of the nodes of other relays when it reads nothing of them any more


def listed(hub: Hub) -> int:
    return len(list(hub.fleet.selected.listed(Rights.of(TENANT, [READ_ONLY]))))


def ignore(*_: object) -> None:
    """Change nothing of sessions and keys."""


def test_tools_of_nodes_elsewhere_leave_half_a_minute_after_their_nodes(hub: Hub) -> None:
    seconds = Seconds()

    def show(node_id: str, elsewhere: bool) -> bool:  # noqa: FBT001 - as ``Effects`` has it
        return hub.fleet.connection_changed(node_id, Where.ELSEWHERE if elsewhere else Where.NOWHERE)

    presence = Presence(OWN, Effects(ignore, show, ignore, ignore), seconds)
    hub.announce(hub.ca.issue())
    presence.begin("a bucket")
    presence.relay_seen(OWN)
    presence.node_seen(NODE_ID, NodeEntry(OTHER, "S1", connected=True, revision=7), 7)
    hub.clock.advance(2 * GRACE_MS)
    assert listed(hub) == 2
    seconds.now += UNREAD_S - 1
    presence.forget_unread()
    assert presence.nodes_elsewhere() == 1
    seconds.now += 1
    presence.forget_unread()
    assert presence.nodes_elsewhere() == 0
    hub.clock.advance(GRACE_MS - 1)
    assert listed(hub) == 2
    hub.clock.advance(1)
    assert listed(hub) == 0
    assert (UNREAD_S, GRACE_MS) == (30, 30_000)  # as docs/cluster.md says
