"""What is listed follows the records of the nodes, and time."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relay.auth.permissions import Rights
from relay.fleet.node_index import NodeIndex
from relay.fleet.node_record import NO_TOOLS, NodeRecord
from relay.fleet.tool_index import ToolIndex
from relay.fleet.tools import Projector, Tool
from schemas.kinds import KindRegistry
from schemas.registry import SchemaRegistry
from schemas.trust import TrustedManifest
from tests.fakes.signer import DAY_MS, ECHO, METRICS, NODE_ID, NOW_MS, OTHER_NODE_ID, TENANT, SimulatedCa

TENANTS = (TENANT, "globex")
CLASSES = (frozenset({"read_only"}), frozenset({"read_only", "reversible"}), frozenset[str]())
AUDIENCES = [Rights(tenant, classes) for tenant, classes in product(TENANTS, CLASSES)]
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
        node.connected, node.grace_until_ms = connected, self.now_ms + grace_ms
        self.index.update(node, self.now_ms)

    def drop(self, node: NodeRecord) -> None:
        node.manifest, node.tools = None, NO_TOOLS
        self.index.update(node, self.now_ms)

    def move(self, node: NodeRecord, tenant: str) -> None:
        node.tenant = tenant
        self.index.update(node, self.now_ms)

    def listed(self, rights: Rights) -> list[Tool]:
        return self.index.listed(rights, self.now_ms)

    def expected(self, rights: Rights) -> list[Tool]:
        """Return what a look at every node finds."""
        tools = [
            tool
            for node in self.nodes
            if node.manifest is not None and self.now_ms < node.manifest.good_until_ms
            if node.connected or self.now_ms < node.grace_until_ms
            for tool in node.tools.values()
            if rights.allow(node.tenant, tool.safety_class)
        ]
        return sorted(tools, key=lambda tool: tool.place)

    def versions(self) -> dict[Rights, object]:
        return {rights: self.index.version(rights, self.now_ms) for rights in AUDIENCES}


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
