"""What is listed follows the records of the nodes, and time."""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from itertools import product
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relay.auth.permissions import Rights
from relay.fleet.clock_comparison import HELD_MS
from relay.fleet.node_index import (
    KEPT,
    DueTimes,
    FleetChange,
    FleetChanges,
    NodeChange,
    NodeCounts,
    NodeIndex,
)
from relay.fleet.node_record import NO_TOOLS, ManifestStatus, NodeRecord, NodeState, Where
from relay.fleet.tool_index import ToolIndex
from relay.fleet.tools import Projector, Tool
from relay.fleet.usability import Decision
from schemas.kinds import KindRegistry
from schemas.manifest import MAX_FUTURE_MS
from schemas.registry import SchemaRegistry
from schemas.trust import TrustedManifest
from tests.fakes.hub import Hub
from tests.fakes.signer import (
    DAY_MS,
    ECHO,
    METRICS,
    NODE_ID,
    NOW_MS,
    OTHER_NODE_ID,
    TENANT,
    TTL_MS,
    SimulatedCa,
    key_named,
)

CA = SimulatedCa()
DAYS = 90


def record(*, ends_ms: int, grace_until_ms: int, connected: bool) -> NodeRecord:
    node = CA.issue()
    manifest = TrustedManifest(node.identity(), "", 0, ends_ms, b"", b"")
    return NodeRecord(
        NODE_ID, TENANT, manifest=manifest, grace_until_ms=grace_until_ms, where=where_of(connected)
    )


def where_of(connected: bool) -> Where:  # noqa: FBT001 - it is all that is asked
    return Where.HERE if connected else Where.NOWHERE


@pytest.mark.parametrize(
    ("ends_ms", "grace_until_ms", "connected", "until_ms"),
    [
        pytest.param(10, 5, True, 10, id="connected"),
        pytest.param(10, 5, False, 5, id="in its grace"),
        pytest.param(5, 10, False, 5, id="with a manifest that ends within its grace"),
        pytest.param(DAYS * 2 * DAY_MS + NOW_MS, 0, True, DAYS * DAY_MS + NOW_MS, id="with its leaf"),
    ],
)
def test_tools_are_listed_until_the_first_end(
    ends_ms: int, grace_until_ms: int, until_ms: int, *, connected: bool
) -> None:
    node = record(ends_ms=ends_ms, grace_until_ms=grace_until_ms, connected=connected)
    assert node.listed_until_ms == until_ms
    assert node.is_listed(until_ms - 1)
    assert not node.is_listed(until_ms)


def test_without_a_manifest_nothing_is_listed() -> None:
    assert not NodeRecord(NODE_ID, TENANT, where=Where.HERE, grace_until_ms=10).is_listed(0)


@pytest.mark.holds("RFC-0001/2/kid-to-tenant")
def test_two_leaves_are_kept_and_the_newest_decides_the_tenant() -> None:
    leaves = [
        CA.issue(NODE_ID, tenant, key=key_named(tenant), now_ms=NOW_MS - (3 - age) * DAY_MS).identity()
        for age, tenant in enumerate(("oldest", "older", "newest"))
    ]
    for order in (leaves, leaves[::-1], [leaves[2], leaves[0], leaves[1]]):
        node = NodeRecord(NODE_ID, TENANT)
        for leaf in order:
            node.keep(leaf)
        assert set(node.identities) == {leaf.kid for leaf in leaves[1:]}
        assert node.tenant == "newest"


def test_only_an_accepted_manifest_counts_as_announced() -> None:
    node = NodeRecord(NODE_ID, TENANT)
    node.withdraw()  # as by a tombstone that the broker has kept
    assert not node.has_announced
    node.announce(NO_TOOLS)
    node.withdraw()
    assert node.has_announced


TENANTS = (TENANT, "globex")
CLASSES = (frozenset({"read_only"}), frozenset({"read_only", "reversible"}), frozenset[str]())
KINDS_OF_TOKENS = (None, ("system.e*",))
AUDIENCES = [
    Rights(tenant, classes, kinds=kinds)
    for tenant, classes, kinds in product(TENANTS, CLASSES, KINDS_OF_TOKENS)
]
SETS = ([ECHO], [METRICS], [ECHO, {**METRICS, "safety_class": "reversible"}])
LEAVES = {node_id: SimulatedCa().issue(node_id) for node_id in (NODE_ID, OTHER_NODE_ID)}


def announced(projector: Projector, node_id: str, variant: int) -> tuple[TrustedManifest, Mapping[str, Tool]]:
    leaf = LEAVES[node_id]
    wire = leaf.manifest(capabilities=SETS[variant])
    manifest = TrustedManifest(leaf.identity(), "", NOW_MS, NOW_MS, wire, b"")
    return manifest, projector.project(node_id, SETS[variant])


PROJECTOR = Projector(SchemaRegistry(), KindRegistry())
ANNOUNCED = {key: announced(PROJECTOR, *key) for key in product(LEAVES, range(len(SETS)))}


@dataclass
class Stage:
    """An index of two nodes, and what it is to agree with."""

    index: NodeIndex = field(default_factory=NodeIndex)
    now_ms: int = NOW_MS
    changed: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.nodes = [NodeRecord(node_id, TENANT) for node_id in LEAVES]
        self.index.follow(self.changed.add)
        for node in self.nodes:
            self.index.update(node, self.now_ms)

    def announce(self, node: NodeRecord, variant: int, ttl_ms: int) -> None:
        manifest, node.tools = ANNOUNCED[node.node_id, variant]
        node.manifest = replace(manifest, expires_at_ms=self.now_ms + ttl_ms)
        self.index.update(node, self.now_ms)

    def connect(self, node: NodeRecord, *, connected: bool, grace_ms: int = 30) -> None:
        node.where, node.grace_until_ms = where_of(connected), self.now_ms + grace_ms
        self.index.update(node, self.now_ms)

    def drop(self, node: NodeRecord) -> None:
        node.manifest, node.tools = None, NO_TOOLS
        self.index.update(node, self.now_ms)

    def move(self, node: NodeRecord, tenant: str) -> None:
        node.tenant = tenant
        self.index.update(node, self.now_ms)

    def tools(self) -> ToolIndex:
        self.index.settle(self.now_ms)
        return self.index.tools

    def listed(self, rights: Rights) -> list[Tool]:
        return self.tools().listed(rights)

    def expected(self, rights: Rights) -> list[Tool]:
        """Return what a look at every node finds."""
        tools = [
            tool
            for node in self.nodes
            if node.manifest is not None and self.now_ms < node.manifest.good_until_ms
            if node.connected or self.now_ms < node.grace_until_ms
            for tool in node.tools.values()
            if rights.allow(node.tenant, tool.safety_class, tool.surface.kind)
        ]
        return sorted(tools, key=lambda tool: tool.place)

    def versions(self) -> dict[Rights, object]:
        return {rights: self.tools().version(rights) for rights in AUDIENCES}


STEPS: list[Callable[[Stage, NodeRecord, int], None]] = [
    lambda stage, node, number: stage.announce(node, number % len(SETS), number),
    lambda stage, node, number: stage.announce(node, 0, 100 * number),
    lambda stage, node, _: stage.connect(node, connected=True),
    lambda stage, node, number: stage.connect(node, connected=False, grace_ms=number),
    lambda stage, node, _: stage.drop(node),
    lambda stage, node, number: stage.move(node, TENANTS[number % 2]),
    lambda stage, _, number: setattr(stage, "now_ms", stage.now_ms + number),
    lambda stage, _, number: setattr(stage, "now_ms", stage.now_ms - number),
]
Step = tuple[Callable[[Stage, NodeRecord, int], None], int, int]


@given(st.lists(st.tuples(st.sampled_from(STEPS), st.integers(0, 1), st.integers(0, 99)), max_size=60))
def test_what_is_listed_is_what_a_look_at_every_node_finds(steps: list[Step]) -> None:
    stage = Stage()
    for step, which, number in steps:
        before = stage.versions()
        stage.changed.clear()
        step(stage, stage.nodes[which], number)
        after = stage.versions()
        for rights in AUDIENCES:
            expected = ToolIndex()
            expected.add(rights.tenant, stage.expected(rights))
            assert stage.listed(rights) == stage.expected(rights)
            assert after[rights] == expected.version(rights)
            assert rights.tenant in stage.changed or before[rights] == after[rights]
        for tenant in TENANTS:
            found = stage.index.of_tenant(tenant)
            assert found == {node.node_id: node for node in stage.nodes if node.tenant == tenant}


@pytest.fixture
def stage() -> Stage:
    return Stage()


READERS = AUDIENCES[0]


def test_a_renewal_and_a_heartbeat_change_nothing_that_is_followed(stage: Stage) -> None:
    node = stage.nodes[0]
    stage.announce(node, 0, ttl_ms=1000)
    stage.connect(node, connected=True)
    assert stage.changed == {TENANT}
    stage.changed.clear()
    for _ in range(100):
        stage.now_ms += 500
        stage.announce(node, 0, ttl_ms=1000)
        stage.connect(node, connected=True)
        assert stage.listed(READERS)
    assert stage.changed == set()


def test_a_clock_that_is_set_back_brings_back_what_had_not_ended_then(stage: Stage) -> None:
    node = stage.nodes[0]
    stage.announce(node, 0, ttl_ms=1000)
    stage.connect(node, connected=True)
    stage.now_ms += DAY_MS
    assert stage.listed(READERS) == []
    stage.now_ms -= DAY_MS
    assert stage.listed(READERS) == stage.expected(READERS) != []


def test_a_node_is_found_by_its_id_and_by_its_tenant(stage: Stage) -> None:
    node, other = stage.nodes
    stage.move(other, "globex")
    assert list(stage.index) == [node, other]
    assert stage.index.get(NODE_ID) is stage.index[NODE_ID] is node
    assert stage.index.get("no node") is None
    assert dict(stage.index.of_tenant("globex")) == {OTHER_NODE_ID: other}
    assert dict(stage.index.of_tenant("unknown")) == {}


RANDOM_STEPS = 400
OTHER_TENANT = f"not-{TENANT}"


def test_a_change_is_counted_and_what_is_zero_is_gone() -> None:
    counts = NodeCounts()
    states = [
        NodeState(TENANT, ManifestStatus.AHEAD, 1),
        NodeState(OTHER_TENANT, ManifestStatus.IN_FORCE, None),
        None,
    ]
    seen = []
    for before, after in zip([None, *states], states, strict=False):
        counts.change(before, after)
        of_tenants = [dict(counts.of_tenants(status)) for status in ManifestStatus]
        seen.append((counts.expected, counts.received_in(1), of_tenants))
    assert seen == [(1, 1, [{}, {TENANT: 1}]), (0, 0, [{OTHER_TENANT: 1}, {}]), (0, 0, [{}, {}])]


def test_the_numbers_are_those_of_counting_all_nodes_whatever_happens(hub: Hub) -> None:
    random, subscriptions = Random(7), 0  # noqa: S311 - the same steps each time, and no secret
    met = Counter[ManifestStatus | None]()
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
            fleet.connection_changed(node.node_id, Where.HERE if not node.connected else Where.NOWHERE)

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
    for _ in range(RANDOM_STEPS):
        random.choice(steps)()
        fleet.sweep()
        expected = [
            node for node in index if node.mark and node.node_id not in index.decided[Decision.RETIRED]
        ]
        assert fleet.inventory.known() == len(expected)
        assert fleet.inventory.missing() == sum(node.received_in != subscriptions for node in expected)
        states = [node.state(hub.clock.now_ms, is_expected=False) for node in index]
        standings = Counter((state.manifest_status, state.tenant) for state in states)
        met.update(status for status, _ in standings)
        for status in ManifestStatus:
            of_tenants = {tenant: count for (each, tenant), count in standings.items() if each is status}
            assert index.counts.of_tenants(status) == of_tenants
    assert min(met[status] for status in (None, *ManifestStatus)) > RANDOM_STEPS // 20


def test_a_time_that_moves_later_adds_nothing_to_the_queue() -> None:
    due = DueTimes()
    for at_ms in range(1000):
        due.no_later_than("a", at_ms)
    assert len(due) == 1


def test_times_that_move_earlier_again_and_again_do_not_fill_the_queue() -> None:
    due = DueTimes()
    names = [f"node {number}" for number in range(10)]
    for at_ms in range(10_000, 0, -1):
        due.no_later_than(names[at_ms % 10], at_ms)
    assert len(due) <= 2 * len(names) + 64
    assert sorted(due.take(10)) == sorted(names)


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 50), st.booleans()), max_size=200))
def test_a_name_is_due_at_the_earliest_time_that_was_asked_for(steps: list[tuple[str, int, bool]]) -> None:
    due, model = DueTimes(), dict[str, int]()
    for name, at_ms, takes in steps:
        if takes:
            ready = sorted((due_ms, each) for each, due_ms in model.items() if due_ms <= at_ms)
            assert list(due.take(at_ms)) == [each for _, each in ready]
            model = {each: due_ms for each, due_ms in model.items() if due_ms > at_ms}
        else:
            due.no_later_than(name, at_ms)
            model[name] = min(at_ms, model.get(name, at_ms))


def test_changes_of_a_tenant_are_kept_in_order_and_the_oldest_is_dropped_first() -> None:
    changes = FleetChanges(started_ms=100)
    for number in range(KEPT + 2):
        changes.record("acme", FleetChange(1000 + number, f"node {number}", NodeChange.CAME))
    kept = changes.since("acme", 0)
    assert len(kept) == KEPT
    assert (kept[0].at_ms, kept[-1].at_ms) == (1002, 1001 + KEPT)
    assert changes.complete_since_ms("acme") == 1002
    assert changes.since("acme", 1001 + KEPT) == kept[-1:]


def test_a_tenant_without_changes_has_a_complete_and_empty_history() -> None:
    changes = FleetChanges(started_ms=100)
    changes.record("globex", FleetChange(1000, "node", NodeChange.CAME))
    assert changes.since("acme", 0) == []
    assert changes.complete_since_ms("acme") == 100
