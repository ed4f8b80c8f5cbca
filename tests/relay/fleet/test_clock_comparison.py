"""What the manifests of several nodes say of this machine's clock."""

from collections.abc import Iterator

import pytest

from relay.fleet.clock_comparison import HELD_MS
from schemas.manifest import MAX_FUTURE_MS
from tests.fakes.hub import Hub
from tests.fakes.signer import DAY_MS, NOW_MS, TENANT, SimulatedNode

AHEAD_MS = NOW_MS + MAX_FUTURE_MS + 1
BEHIND = "this machine's clock is behind those of the nodes: their manifests are refused"


@pytest.fixture
def nodes(hub: Hub) -> Iterator[SimulatedNode]:
    """As many nodes as a test takes."""
    return (hub.ca.issue(f"01hzx9k3m4p7q8r9s0t1v2w3{number}") for number in range(10, 99))


def are_ahead(hub: Hub) -> bool:
    """Return whether the nodes' clocks are ahead by now."""
    hub.fleet.sweep()
    return hub.fleet.clocks.are_ahead


def announce(hub: Hub, nodes: Iterator[SimulatedNode], *issued_at_ms: int) -> list[SimulatedNode]:
    """Have a node announce what it signed, for each of those times."""
    announced = [next(nodes) for _ in issued_at_ms]
    for node, signed_ms in zip(announced, issued_at_ms, strict=True):
        hub.announce(node, issued_at_ms=signed_ms)
    return announced


@pytest.mark.parametrize(
    ("ahead", "others", "believed"),
    [(2, 0, False), (3, 0, True), (3, 2, True), (3, 3, False), (4, 3, True), (0, 3, False)],
)
def test_more_nodes_than_not_and_three_at_least_are_believed(
    hub: Hub,
    nodes: Iterator[SimulatedNode],
    ahead: int,
    others: int,
    believed: bool,  # noqa: FBT001 - a parameter of the test
) -> None:
    announce(hub, nodes, *[AHEAD_MS] * ahead, *[NOW_MS] * others)
    assert are_ahead(hub) is believed


def test_the_nodes_of_one_tenant_cannot_say_it_for_those_of_another(
    hub: Hub, nodes: Iterator[SimulatedNode]
) -> None:
    announce(hub, nodes, *[AHEAD_MS] * 5)
    assert are_ahead(hub)
    other = hub.ca.issue(tenant=f"not-{TENANT}")
    announce(hub, iter([other]), NOW_MS)
    assert not are_ahead(hub)


def test_a_manifest_that_its_node_has_not_signed_says_nothing(
    hub: Hub, nodes: Iterator[SimulatedNode]
) -> None:
    stranger = next(nodes)
    for node in (next(nodes) for _ in range(5)):
        hub.announce(node, issued_at_ms=AHEAD_MS, signer=stranger.key)
    assert not are_ahead(hub)


def test_a_node_whose_clock_is_wrong_is_named_until_it_is_right(
    hub: Hub, nodes: Iterator[SimulatedNode]
) -> None:
    (ahead,) = announce(hub, nodes, AHEAD_MS)
    behind = next(nodes)
    hub.fleet.offer_identity(behind.node_id, behind.leaf_pem)
    expired = behind.manifest(issued_at_ms=NOW_MS - DAY_MS)
    hub.fleet.offer_manifest(behind.node_id, expired, "broker")  # an old one that the broker has kept
    assert hub.fleet.clocks.wrong == {ahead.node_id: "ahead"}
    hub.fleet.offer_manifest(behind.node_id, expired, "session")
    assert hub.fleet.clocks.wrong == {ahead.node_id: "ahead", behind.node_id: "behind"}
    hub.fleet.offer_manifest(behind.node_id, behind.manifest(), "session")
    assert hub.fleet.clocks.wrong == {ahead.node_id: "ahead"}
    hub.clock.advance(HELD_MS)
    hub.fleet.sweep()
    assert hub.fleet.clocks.wrong == {}


def test_it_is_said_once_until_the_nodes_manifests_are_accepted(
    hub: Hub, nodes: Iterator[SimulatedNode]
) -> None:
    ahead = announce(hub, nodes, *[AHEAD_MS] * 3)
    assert are_ahead(hub)
    assert are_ahead(hub)
    assert [line["nodes"] for line in hub.lines.entries(BEHIND)] == [3]
    hub.clock.advance(2)
    announce(hub, iter(ahead[:1]), AHEAD_MS + 1)
    assert not are_ahead(hub)


def test_what_was_seen_long_ago_or_is_of_a_node_that_is_revoked_counts_no_more(
    hub: Hub, nodes: Iterator[SimulatedNode]
) -> None:
    ahead = announce(hub, nodes, *[AHEAD_MS] * 3)
    assert are_ahead(hub)
    hub.fleet.drop_leaves(lambda leaf: leaf.node_id == ahead[0].node_id)
    assert not are_ahead(hub)
    announce(hub, nodes, AHEAD_MS)
    assert are_ahead(hub)
    hub.clock.advance(HELD_MS)
    assert not are_ahead(hub)
