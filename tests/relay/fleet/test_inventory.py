"""What the broker has not sent of what is known."""

from pathlib import Path

from relay.fleet.inventory import MAX_NODES, PENDING_FOR_MS, WINDOW_MS, PendingManifests
from schemas.manifest import etag_of
from schemas.registry import SchemaRegistry
from tests.fakes.hub import Hub
from tests.fakes.signer import NODE_ID, NOW_MS, OTHER_NODE_ID, SimulatedNode

SHORT = "the broker has not sent all manifests that were known; see docs/brokers.md"


def test_a_node_counts_as_missing_until_the_broker_has_sent_an_announce_of_it(
    hub: Hub, node: SimulatedNode
) -> None:
    inventory = hub.fleet.inventory
    hub.announce(node)
    hub.fleet.offer_identity(OTHER_NODE_ID, hub.ca.issue(OTHER_NODE_ID).leaf_pem)  # it never announced itself
    inventory.subscribed()
    assert (inventory.missing(), hub.counted("inventory_missing")) == (1, 1)
    inventory.received(NODE_ID, b"{}")
    inventory.received("01hzx9k3m4p7q8r9s0t1v2w3x0", b"{}")  # of a node that is not known
    assert (inventory.missing(), hub.counted("inventory_missing")) == (0, 0)
    inventory.check()
    assert hub.lines.entries(SHORT) == []
    inventory.subscribed()
    inventory.check()
    [line] = hub.lines.entries(SHORT)
    assert (line["missing"], line["known"]) == (1, 1)


def test_the_inventory_is_there_once_all_that_is_known_has_come_or_has_had_time_to(
    hub: Hub, node: SimulatedNode
) -> None:
    inventory = hub.fleet.inventory
    hub.announce(node)

    def came() -> None:
        inventory.received(NODE_ID, b"{}")

    seen = [(inventory.is_subscribed, inventory.is_there)]

    def another_announces_itself() -> None:
        hub.announce(hub.ca.issue(OTHER_NODE_ID))

    steps = (inventory.subscribed, came, another_announces_itself, inventory.subscribed, inventory.check)
    for step in steps:
        step()
        seen.append((inventory.is_subscribed, inventory.is_there))
    assert seen == [
        (False, False),
        (True, False),
        (True, True),
        (True, True),
        (True, False),
        (True, True),
    ]


def test_what_the_broker_sent_last_is_known_by_its_etag(hub: Hub, node: SimulatedNode) -> None:
    inventory = hub.fleet.inventory
    assert inventory.etag_by_broker(NODE_ID) is None
    wire = hub.announce(node)
    assert inventory.etag_by_broker(NODE_ID) is None  # it came by the session
    inventory.received(NODE_ID, wire)
    assert inventory.etag_by_broker(NODE_ID) == etag_of(wire)
    inventory.received(NODE_ID, b"forged")
    assert inventory.etag_by_broker(NODE_ID) == etag_of(b"forged")


def test_an_announce_that_arrives_before_the_leaf_is_not_missing_once_that_arrives(
    hub: Hub, node: SimulatedNode
) -> None:
    inventory, wire = hub.fleet.inventory, node.manifest()
    inventory.subscribed()
    inventory.received(NODE_ID, wire)
    hub.fleet.offer_manifest(NODE_ID, wire, "broker")
    hub.fleet.offer_identity(NODE_ID, node.leaf_pem)
    assert (inventory.known(), inventory.missing()) == (1, 0)
    assert inventory.etag_by_broker(NODE_ID) == etag_of(wire)


def test_a_retired_node_is_not_missing(hub: Hub, node: SimulatedNode) -> None:
    hub.announce(node)
    hub.fleet.inventory.subscribed()
    hub.fleet.retire(frozenset({NODE_ID}), ())
    assert hub.fleet.inventory.missing() == 0


async def test_what_is_missing_is_known_from_the_marks_after_a_restart(
    tmp_path: Path, registry: SchemaRegistry
) -> None:
    hub = Hub(tmp_path, registry)
    hub.announce(hub.ca.issue())
    await hub.marks._flush()  # noqa: SLF001 - as once a second
    hub.close()
    again = Hub(tmp_path, registry)
    again.fleet.inventory.subscribed()
    assert again.fleet.inventory.missing() == 1
    again.close()


EVENT = "manifests are missing: does the broker hold back retained messages? see docs/brokers.md"
ETAG = "00" * 32


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


def test_memory_is_bounded_and_given_back() -> None:
    manifests = PendingManifests(list[str]().append, max_bytes=10)
    assert manifests.put(NODE_ID, b"x" * 10, NOW_MS)
    assert not manifests.put(OTHER_NODE_ID, b"y", NOW_MS)
    # In place of its own, as much fits.
    assert manifests.put(NODE_ID, b"z" * 10, NOW_MS)
    manifests.sweep(NOW_MS + PENDING_FOR_MS - 1)
    assert not manifests.put(OTHER_NODE_ID, b"y", NOW_MS)
    manifests.sweep(NOW_MS + PENDING_FOR_MS)
    assert manifests.put(OTHER_NODE_ID, b"y" * 10, NOW_MS)
    manifests.take(OTHER_NODE_ID, NOW_MS)
    assert manifests.put(NODE_ID, b"x" * 10, NOW_MS)


def test_of_what_its_leaf_never_came_for_the_node_is_told() -> None:
    dropped: list[str] = []
    manifests = PendingManifests(dropped.append, max_bytes=10)
    manifests.put(NODE_ID, b"old", NOW_MS)
    manifests.put(NODE_ID, b"old", NOW_MS)
    assert dropped == []
    manifests.put(NODE_ID, b"new", NOW_MS)
    assert dropped == [NODE_ID]
    manifests.put(OTHER_NODE_ID, b"too large for it", NOW_MS)
    assert dropped == [NODE_ID, OTHER_NODE_ID]
    manifests.sweep(NOW_MS + PENDING_FOR_MS)
    assert dropped == [NODE_ID, OTHER_NODE_ID, NODE_ID]
    manifests.put(NODE_ID, b"late", NOW_MS)
    assert manifests.take(NODE_ID, NOW_MS + PENDING_FOR_MS) is None
    assert dropped == [NODE_ID, OTHER_NODE_ID, NODE_ID, NODE_ID]
