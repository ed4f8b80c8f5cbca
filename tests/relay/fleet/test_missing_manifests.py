import pytest

from relay.fleet.inventory import MAX_NODES, WINDOW_MS
from schemas.manifest import etag_of
from tests.fakes.hub import Hub
from tests.fakes.signer import NODE_ID, OTHER_NODE_ID, SimulatedNode

EVENT = "manifests are missing: does the broker hold back retained messages? see docs/brokers.md"
ETAG = "00" * 32


@pytest.fixture
def node(hub: Hub) -> SimulatedNode:
    return hub.ca.issue()


def warned(hub: Hub) -> list[int]:
    """Return the number of nodes in each warning."""
    lines = hub.lines.entries(EVENT)
    assert all(line["level"] == "warning" for line in lines)
    return [line["nodes"] for line in lines]


def test_nodes_that_live_a_minute_without_a_manifest_are_told_and_counted_once(hub: Hub) -> None:
    for node_id in (NODE_ID, OTHER_NODE_ID, NODE_ID):
        hub.fleet.inventory.heartbeat(node_id, ETAG)
    hub.clock.advance(WINDOW_MS - 1)
    hub.fleet.inventory.heartbeat(NODE_ID, ETAG)
    assert warned(hub) == []
    hub.clock.advance(1)
    hub.fleet.inventory.heartbeat(NODE_ID, ETAG)
    assert warned(hub) == [2]


def test_they_are_told_at_most_once_a_minute(hub: Hub) -> None:
    for _ in range(10):
        hub.fleet.inventory.heartbeat(NODE_ID, ETAG)
        hub.clock.advance(WINDOW_MS // 2)
    assert warned(hub) == [1, 1, 1]


def test_a_heartbeat_that_overtakes_its_manifest_is_no_news(hub: Hub, node: SimulatedNode) -> None:
    hub.fleet.inventory.heartbeat(NODE_ID, ETAG)
    wire = hub.announce(node)
    hub.clock.advance(WINDOW_MS)
    hub.fleet.inventory.heartbeat(NODE_ID, etag_of(wire))
    hub.fleet.inventory.heartbeat(NODE_ID, ETAG)
    hub.fleet.inventory.heartbeat(OTHER_NODE_ID, ETAG)
    assert warned(hub) == []
    hub.clock.advance(WINDOW_MS)
    hub.fleet.inventory.heartbeat(OTHER_NODE_ID, ETAG)
    assert warned(hub) == [1]


def test_a_manifest_without_its_leaf_is_missing(hub: Hub, node: SimulatedNode) -> None:
    for _ in range(2):
        hub.fleet.offer_manifest(NODE_ID, node.manifest(), "broker")
        hub.fleet.inventory.heartbeat(NODE_ID, ETAG)
        hub.clock.advance(WINDOW_MS)
    assert warned(hub) == [1]


def test_a_manifest_that_was_rejected_is_not_missing(hub: Hub, node: SimulatedNode) -> None:
    hub.fleet.offer_identity(NODE_ID, node.leaf_pem)
    hub.fleet.offer_manifest(NODE_ID, b"{", "broker")
    for _ in range(2):
        hub.fleet.inventory.heartbeat(NODE_ID, ETAG)
        hub.clock.advance(WINDOW_MS)
    assert warned(hub) == []


def test_made_up_nodes_are_counted_up_to_a_bound(hub: Hub) -> None:
    for number in range(MAX_NODES + 5):
        hub.fleet.inventory.heartbeat(f"{number:026d}", ETAG)
    hub.clock.advance(WINDOW_MS)
    hub.fleet.inventory.heartbeat(NODE_ID, ETAG)
    assert warned(hub) == [MAX_NODES]
