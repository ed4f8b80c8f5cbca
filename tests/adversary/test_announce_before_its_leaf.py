"""Attacker: the order in which a broker delivers, and one who exploits that the relay waits for a leaf.

Tried: a renewed leaf's announce that arrives before the identity; one whose leaf never comes or comes too
late; one that pushes another out. What must happen: pending for 30 s and believed only with the leaf; what
was in force stays in force meanwhile; what is dropped is said in the audit.
"""

import pytest

from relay.fleet.inventory import PENDING_FOR_MS
from schemas.trust import Outcome
from tests.fakes.hub import Hub
from tests.fakes.refusals import audited_refusals, manifest_in_force
from tests.fakes.signer import NODE_ID, NOW_MS, OTHER_NODE_ID, SimulatedNode, key_named


@pytest.fixture
def renewed(hub: Hub, node: SimulatedNode) -> SimulatedNode:
    """The same node with a new leaf, as the relay does not know it yet."""
    hub.connect(node)
    return hub.ca.issue(key=key_named("the renewed key"), now_ms=NOW_MS + 60_000)


def announce(hub: Hub, node: SimulatedNode, issued_at_ms: int = NOW_MS + 1) -> bytes:
    wire = node.manifest(issued_at_ms=issued_at_ms)
    assert hub.fleet.offer_manifest(NODE_ID, wire, "broker").outcome is Outcome.PENDING
    return wire


def test_it_waits_and_what_was_in_force_stays_in_force(
    hub: Hub, node: SimulatedNode, renewed: SimulatedNode
) -> None:
    announce(hub, renewed)
    assert manifest_in_force(hub, node) == node.manifest()


@pytest.mark.parametrize("waited_ms", [0, PENDING_FOR_MS - 1])
def test_it_is_accepted_when_its_leaf_comes(hub: Hub, renewed: SimulatedNode, waited_ms: int) -> None:
    wire = announce(hub, renewed)
    hub.clock.advance(waited_ms)
    hub.fleet.sweep()
    hub.fleet.offer_identity(NODE_ID, renewed.leaf_pem)
    assert manifest_in_force(hub, renewed) == wire
    assert audited_refusals(hub) == []


@pytest.mark.parametrize("swept", [True, False])
def test_after_half_a_minute_its_leaf_comes_too_late(
    hub: Hub, node: SimulatedNode, renewed: SimulatedNode, *, swept: bool
) -> None:
    announce(hub, renewed)
    hub.clock.advance(PENDING_FOR_MS)
    if swept:
        hub.fleet.sweep()
    hub.fleet.offer_identity(NODE_ID, renewed.leaf_pem)
    assert manifest_in_force(hub, node) == node.manifest()


def test_waiting_gives_no_more_trust_than_coming_in_order(
    hub: Hub, node: SimulatedNode, renewed: SimulatedNode
) -> None:
    forged = renewed.manifest(issued_at_ms=NOW_MS + 1, signer=key_named("a thief"))
    assert hub.fleet.offer_manifest(NODE_ID, forged, "broker").outcome is Outcome.PENDING
    hub.fleet.offer_identity(NODE_ID, renewed.leaf_pem)
    assert manifest_in_force(hub, node) == node.manifest()
    (line,) = audited_refusals(hub)
    assert line == {"event": "manifest_refused", "source": NODE_ID, "reason": "signature", "count": 1}


def test_what_waits_is_looked_at_once(hub: Hub, renewed: SimulatedNode) -> None:
    announce(hub, renewed)
    hub.fleet.offer_identity(NODE_ID, renewed.leaf_pem)
    newer = renewed.manifest(issued_at_ms=NOW_MS + 2)
    assert hub.fleet.offer_manifest(NODE_ID, newer, "broker").outcome is Outcome.ACCEPTED
    hub.fleet.offer_identity(NODE_ID, renewed.leaf_pem)
    assert manifest_in_force(hub, renewed) == newer
    assert audited_refusals(hub) == []


def test_another_nodes_leaf_does_not_release_it(
    hub: Hub, node: SimulatedNode, renewed: SimulatedNode
) -> None:
    announce(hub, renewed)
    hub.fleet.offer_identity(OTHER_NODE_ID, hub.ca.issue(OTHER_NODE_ID).leaf_pem)
    assert manifest_in_force(hub, node) == node.manifest()


def test_one_that_is_pushed_out_does_not_take_the_newest_along(
    hub: Hub, node: SimulatedNode, renewed: SimulatedNode
) -> None:
    announce(hub, renewed)
    strange = hub.ca.issue(key=key_named("a leaf that never comes"))
    announce(hub, strange, NOW_MS + 2)
    hub.fleet.offer_identity(NODE_ID, renewed.leaf_pem)
    assert manifest_in_force(hub, node) == node.manifest()
    # Pushed out is not refused: the next heartbeat brings the node's own again.
    again = renewed.manifest(issued_at_ms=NOW_MS + 3)
    assert hub.fleet.offer_manifest(NODE_ID, again, "broker").outcome is Outcome.ACCEPTED


def test_one_whose_leaf_never_comes_is_said_in_the_audit(hub: Hub, renewed: SimulatedNode) -> None:
    announce(hub, renewed)
    hub.clock.advance(PENDING_FOR_MS)
    hub.fleet.sweep()
    (line,) = audited_refusals(hub)
    assert (line["event"], line["source"], line["count"]) == ("manifest_refused", NODE_ID, 1)


def test_what_pushes_out_another_is_said_in_the_audit(hub: Hub, node: SimulatedNode) -> None:
    hub.connect(node)
    for number in range(3):
        announce(hub, hub.ca.issue(key=key_named(f"a thief's key {number}")), NOW_MS + number)
    hub.clock.advance(PENDING_FOR_MS)
    hub.fleet.sweep()
    assert sum(line["count"] for line in audited_refusals(hub)) == 3


def test_one_for_which_no_room_is_left_is_said_in_the_audit(hub: Hub, renewed: SimulatedNode) -> None:
    hub.fleet._pending._max_bytes = 0  # noqa: SLF001 - 64 MiB would be slow to fill
    announce(hub, renewed)
    (line,) = audited_refusals(hub)
    assert (line["event"], line["source"], line["count"]) == ("manifest_refused", NODE_ID, 1)
