"""What the broker has not sent of what is known."""

from pathlib import Path

import pytest

from schemas.manifest import etag_of
from schemas.registry import SchemaRegistry
from tests.fakes.hub import Hub
from tests.fakes.signer import NODE_ID, OTHER_NODE_ID, SimulatedNode

SHORT = "the broker has not sent all manifests that were known; see docs/brokers.md"


@pytest.fixture
def node(hub: Hub) -> SimulatedNode:
    return hub.ca.issue()


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
