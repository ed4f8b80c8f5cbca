"""What a relay lists of the nodes of other relays when it reads nothing of them any more."""

from relay.auth.permissions import Rights
from relay.cluster.presence import UNREAD_S, Effects, NodeEntry, Presence
from relay.fleet.fleet import GRACE_MS
from tests.fakes.hub import READ_ONLY, Hub
from tests.fakes.seconds import Seconds
from tests.fakes.signer import NODE_ID, TENANT

OWN, OTHER = "OWN", "OTHER"


def listed(hub: Hub) -> int:
    return len(list(hub.fleet.selected.listed(Rights.of(TENANT, [READ_ONLY]))))


def ignore(*_: object) -> None:
    """Change nothing of sessions and keys."""


def test_tools_of_nodes_elsewhere_leave_half_a_minute_after_their_nodes(hub: Hub) -> None:
    seconds = Seconds()
    presence = Presence(OWN, Effects(ignore, hub.fleet.show_connected_elsewhere, ignore, ignore), seconds)
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
