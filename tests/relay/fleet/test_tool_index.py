"""The sorted tools of each tenant, and the versions of their sets."""

from dataclasses import replace
from itertools import permutations

import pytest

from relay.auth.permissions import Rights
from relay.fleet.tool_index import Only, ToolIndex
from relay.fleet.tools import Projector, Tool
from schemas.kinds import KindRegistry
from schemas.registry import SchemaRegistry
from tests.fakes.signer import ECHO, METRICS, NODE_ID, TENANT

OTHER_TENANT = "globex"
READERS = Rights(TENANT, frozenset({"read_only"}))
ACTORS = Rights(TENANT, frozenset({"physical_actuation"}))
ALL = Rights(TENANT, frozenset({"read_only", "reversible", "physical_actuation"}))


@pytest.fixture(scope="module")
def tools(registry: SchemaRegistry) -> list[Tool]:
    classes = ["read_only", "reversible", "physical_actuation"]
    capabilities = [
        {**ECHO, "cap_id": f"echo{number:03}", "safety_class": classes[number % 3]} for number in range(150)
    ]
    return list(Projector(registry, KindRegistry()).project(NODE_ID, capabilities).values())


def index_of(tools: list[Tool]) -> ToolIndex:
    index = ToolIndex()
    index.add(TENANT, tools)
    return index


def by_place(tools: list[Tool], rights: Rights = ALL) -> list[Tool]:
    return sorted((t for t in tools if t.safety_class in rights.safety_classes), key=lambda tool: tool.place)


@pytest.mark.parametrize("rights", [READERS, ACTORS, ALL], ids=["readers", "actors", "all"])
def test_what_rights_reach_is_listed_by_place_in_whatever_order_it_came(
    tools: list[Tool], rights: Rights
) -> None:
    assert index_of(tools[::-1]).listed(rights) == by_place(tools, rights)
    assert index_of(tools[75:] + tools[:75]).listed(rights) == by_place(tools, rights)


@pytest.mark.parametrize("rights", [READERS, ALL], ids=["one class", "all"])
@pytest.mark.parametrize("limit", [1, 7, 64])
def test_parts_follow_one_another_without_gap_or_overlap(
    tools: list[Tool], rights: Rights, limit: int
) -> None:
    index = index_of(tools)
    seen = index.listed(rights, limit=limit)
    while part := index.listed(rights, seen[-1].place, limit):
        assert len(part) <= limit
        seen += part
    assert seen == by_place(tools, rights)


def test_a_part_goes_on_behind_a_tool_that_is_gone(tools: list[Tool]) -> None:
    index = index_of(tools)
    gone = by_place(tools)[10]
    index.remove(TENANT, [gone])
    assert index.listed(ALL, gone.place, 1) == [by_place(tools)[11]]


def test_another_tenant_sees_nothing_and_what_is_removed_is_gone(tools: list[Tool]) -> None:
    index = index_of(tools)
    other = Rights(OTHER_TENANT, ALL.safety_classes)
    assert index.listed(other) == []
    index.remove(TENANT, tools)
    assert index.listed(ALL) == []
    assert index.version(ALL) == ToolIndex().version(ALL)


def test_the_version_does_not_depend_on_the_order_and_returns_with_the_set(tools: list[Tool]) -> None:
    few = tools[:4]
    versions = {index_of(list(order)).version(ALL) for order in permutations(few)}
    assert len(versions) == 1
    index = index_of(few)
    index.remove(TENANT, few[:1])
    assert {index.version(ALL)} != versions
    index.add(TENANT, few[:1])
    assert {index.version(ALL)} == versions


def test_the_version_moves_for_those_alone_who_see_the_change(tools: list[Tool]) -> None:
    index = index_of(tools)
    readers, actors, everyone = (index.version(rights) for rights in (READERS, ACTORS, ALL))
    index.remove(TENANT, [next(tool for tool in tools if tool.safety_class == "read_only")])
    assert index.version(READERS) != readers
    assert index.version(ACTORS) == actors
    assert index.version(ALL) != everyone


def test_every_set_of_a_few_tools_has_its_own_version(tools: list[Tool]) -> None:
    few = tools[:8]
    sets = [[tool for bit, tool in enumerate(few) if mask >> bit & 1] for mask in range(256)]
    assert len({index_of(each).version(ALL) for each in sets}) == 256


def test_what_agents_do_not_see_leaves_the_version(tools: list[Tool]) -> None:
    one = tools[0]
    assert index_of([one]).version(ALL) == index_of([replace(one, handler_ms=1, etag="00")]).version(ALL)
    assert index_of([one]).version(ALL) != index_of([replace(one, canonical="sysecho.x.y.z")]).version(ALL)


def test_only_the_tools_of_some_kinds_and_nodes_are_listed(
    tools: list[Tool], registry: SchemaRegistry
) -> None:
    other = "01hzx9k3m4p7q8r9s0t1v2w3xz"
    metrics = {**METRICS, "verbs": ["snapshot"]}
    more = list(Projector(registry, KindRegistry()).project(other, [ECHO, metrics]).values())
    everything = [*tools, *more]
    index = index_of(everything)
    for kinds in ((), ("sys",), ("sysecho",), ("sys", "sysecho"), ("none",)):
        for node_ids in (None, {other}, {NODE_ID, other}, set[str]()):
            wanted = [
                tool
                for tool in by_place(everything)
                if (not kinds or tool.surface.kind.short in kinds)
                and (node_ids is None or tool.node_id in node_ids)
            ]
            only = Only(kinds, node_ids)
            assert index.narrowed(ALL, only) == wanted
            assert index.narrowed(ALL, only, limit=3) == wanted[:3]
            if wanted:
                assert index.narrowed(ALL, only, wanted[0].place) == wanted[1:]


def test_what_is_offered_has_the_severest_class_that_the_caller_reaches(tools: list[Tool]) -> None:
    index = index_of(tools[:3])
    assert index.offered(READERS) == {("sysecho", "invoke"): "read_only"}
    assert index.offered(ALL) == {("sysecho", "invoke"): "physical_actuation"}
    index.remove(TENANT, [tool for tool in tools[:3] if tool.safety_class == "physical_actuation"])
    assert index.offered(ALL) == {("sysecho", "invoke"): "reversible"}
    index.remove(TENANT, [tool for tool in tools[:3] if tool.safety_class != "physical_actuation"])
    assert index.offered(ALL) == {}
