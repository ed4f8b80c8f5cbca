"""The numbers of nodes by state, against counting all nodes."""

from collections import Counter
from collections.abc import Callable
from random import Random

from relay.fleet.clock_comparison import HELD_MS
from relay.fleet.node_index import NodeCounts
from relay.fleet.node_record import NodeState, Standing
from relay.fleet.usability import Decision
from schemas.manifest import MAX_FUTURE_MS
from tests.fakes.hub import Hub
from tests.fakes.signer import NOW_MS, TENANT, TTL_MS

STEPS = 400
OTHER_TENANT = f"not-{TENANT}"


def test_a_change_is_counted_and_what_is_zero_is_gone() -> None:
    counts = NodeCounts()
    states = [NodeState(TENANT, Standing.AHEAD, 1), NodeState(OTHER_TENANT, Standing.IN_FORCE, None), None]
    seen = []
    for before, after in zip([None, *states], states, strict=False):
        counts.change(before, after)
        of_tenants = [dict(counts.of_tenants(standing)) for standing in Standing]
        seen.append((counts.expected, counts.received_in(1), of_tenants))
    assert seen == [(1, 1, [{}, {TENANT: 1}]), (0, 0, [{OTHER_TENANT: 1}, {}]), (0, 0, [{}, {}])]


def test_the_numbers_are_those_of_counting_all_nodes_whatever_happens(hub: Hub) -> None:
    random, subscriptions = Random(7), 0  # noqa: S311 - the same steps each time, and no secret
    met = Counter[Standing | None]()
    nodes = [
        hub.ca.issue(f"01hzx9k3m4p7q8r9s0t1v2w3{number}", tenant=TENANT if number % 3 else OTHER_TENANT)
        for number in range(10, 22)
    ]
    fleet, retired = hub.fleet, set[str]()
    index = fleet._nodes  # noqa: SLF001 - what it has is counted one by one

    def announce(ahead_ms: int) -> None:
        node, issued_ms = random.choice(nodes), hub.clock.now_ms + ahead_ms
        fleet.identify(node.node_id, node.leaf_pem)  # its leaf may have been dropped
        hub.announce(node, issued_at_ms=issued_ms, expires_at_ms=issued_ms + TTL_MS)

    def subscribe() -> None:
        nonlocal subscriptions
        fleet.inventory.subscribed()
        subscriptions += 1

    def retire() -> None:
        retired.symmetric_difference_update({random.choice(nodes).node_id})
        forgotten = [node_id for node_id in retired if not random.randrange(3)]
        fleet.retire(frozenset(retired), forgotten)

    def drop() -> None:
        node_id = random.choice(nodes).node_id
        fleet.drop_leaves(lambda leaf: leaf.node_id == node_id)

    def connect() -> None:
        if (node := index.get(random.choice(nodes).node_id)) is not None:
            fleet.set_connected(node.node_id, connected=not node.connected)

    steps: list[Callable[[], object]] = [
        lambda: announce(0),
        lambda: announce(0),
        lambda: announce(MAX_FUTURE_MS + 1),
        subscribe,
        lambda: fleet.inventory.received(random.choice(nodes).node_id, b"{}"),
        lambda: fleet.tombstone(random.choice(nodes).node_id),
        retire,
        drop,
        connect,
        lambda: hub.clock.advance(random.choice([1, HELD_MS // 2, TTL_MS // 2])),
        lambda: hub.clock.advance(-(hub.clock.now_ms - NOW_MS) // 2),
    ]
    for _ in range(STEPS):
        random.choice(steps)()
        fleet.sweep()
        expected = [
            node for node in index if node.mark and node.node_id not in index.decided[Decision.RETIRED]
        ]
        assert fleet.inventory.known() == len(expected)
        assert fleet.inventory.missing() == sum(node.received_in != subscriptions for node in expected)
        states = [node.state(hub.clock.now_ms, is_expected=False) for node in index]
        standings = Counter((state.standing, state.tenant) for state in states)
        met.update(standing for standing, _ in standings)
        for standing in Standing:
            of_tenants = {tenant: count for (each, tenant), count in standings.items() if each is standing}
            assert index.counts.of_tenants(standing) == of_tenants
    assert min(met[standing] for standing in (None, *Standing)) > STEPS // 20
