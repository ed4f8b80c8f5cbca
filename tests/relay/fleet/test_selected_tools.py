"""What is listed of a selection is what a search through everything would find."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relay.auth.permissions import Rights
from relay.fleet.node_names import UnknownNodeError
from relay.fleet.selection import WHOLE_FLEET, SelectedTools, Selection
from relay.fleet.tool_index import SEVERITY
from relay.fleet.tools import BEFORE_ALL, Tool
from relay.settings.config import View
from relay.state.names import NodeName
from schemas.errors import Failure, ToolError
from schemas.projection import parse
from schemas.registry import SchemaRegistry
from tests.fakes.hub import Hub
from tests.fakes.signer import ECHO, METRICS, NODE_ID, OTHER_NODE_ID, TENANT
from tests.fakes.unclamped import unclamped_registry

CLASSES = list(SEVERITY)
READERS = Rights(TENANT, frozenset({"read_only"}))
ALL = Rights(TENANT, frozenset(CLASSES))
OTHERS = Rights("globex", frozenset(CLASSES))
NODES = [f"01hzx9k3m4p7q8r9s0t1v2w{number:03}" for number in range(24)]
TAGS = ("site=north", "site=south", "gateway")
LABELS = {node_id: f"node {number}" for number, node_id in enumerate(NODES[::3])}
TAGS_OF = {
    node_id: tuple(tag for bit, tag in enumerate(TAGS) if number >> bit & 1)
    for number, node_id in enumerate(NODES)
}


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hub]:
    directory = tmp_path_factory.mktemp("relay")
    hub = Hub(directory, unclamped_registry(directory))
    for number, node_id in enumerate(NODES):
        echo = {**ECHO, "safety_class": CLASSES[number % 3]}
        many = [{**ECHO, "cap_id": f"echo{extra:02}"} for extra in range(70 if number == 5 else 0)]
        announced: list[list[Mapping[str, Any]]] = [[echo], [METRICS], [echo, METRICS]]
        own = announced[number % 3]
        tenant = "globex" if number % 8 == 7 else TENANT
        hub.connect(hub.ca.issue(node_id, tenant=tenant), capabilities=[*own, *many])
        hub.fleet.rename(
            {node_id: NodeName(tenant, LABELS.get(node_id, ""), tuple(sorted(TAGS_OF[node_id])))}
        )
    yield hub
    hub.close()


def is_selected(tool: Tool, selection: Selection) -> bool:
    names = {tool.node_id, LABELS.get(tool.node_id, "")}
    return (
        (not selection.nodes or bool(names & set(selection.nodes)))
        and has_wanted(set(TAGS_OF[tool.node_id]), set(selection.tags))
        and (not selection.kinds or tool.surface.kind.short in selection.kinds)
    )


def has_wanted(tags: set[str], wanted: set[str]) -> bool:
    sites = {tag for tag in wanted if tag.startswith("site=")}
    return (not sites or bool(sites & tags)) and ("gateway" not in wanted or "gateway" in tags)


def by_search(hub: Hub, rights: Rights, selection: Selection) -> list[Tool]:
    return [tool for tool in hub.fleet.selected.listed(rights) if is_selected(tool, selection)]


own_nodes = [node_id for number, node_id in enumerate(NODES) if number % 8 != 7]
references = own_nodes + [LABELS[node_id] for node_id in own_nodes if node_id in LABELS]
selections = st.builds(
    Selection,
    nodes=st.lists(st.sampled_from(references), max_size=4).map(tuple),
    kinds=st.frozensets(st.sampled_from(["sys", "sysecho"])),
    tags=st.lists(st.sampled_from(TAGS), max_size=2).map(tuple),
)


@given(
    selection=selections,
    rights=st.sampled_from([READERS, ALL]),
    limit=st.integers(1, 90),
    few=st.sampled_from([1000, -1]),
)
def test_every_page_of_a_selection_is_what_a_search_finds(
    hub: Hub, selection: Selection, rights: Rights, limit: int, few: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("relay.fleet.selection.FEW_NODES", few)
        seen: list[Tool] = []
        after = BEFORE_ALL
        while page := hub.fleet.selected.listed(rights, selection, after, limit):
            assert len(page) <= limit
            seen += page
            after = page[-1].place
    assert seen == by_search(hub, rights, selection)


@given(selection=selections, rights=st.sampled_from([READERS, ALL]))
def test_what_a_selection_offers_is_what_its_tools_are(
    hub: Hub, selection: Selection, rights: Rights
) -> None:
    expected: dict[tuple[str, str], str] = {}
    for tool in by_search(hub, rights, selection):
        known = expected.get(tool.offer, tool.safety_class)
        expected[tool.offer] = max(known, tool.safety_class, key=CLASSES.index)
    assert hub.fleet.selected.offered(rights, selection) == expected


@given(selection=selections)
def test_a_call_is_let_through_where_its_tool_is_listed(hub: Hub, selection: Selection) -> None:
    selected = set(map(id, by_search(hub, ALL, selection)))
    for tool in hub.fleet.selected.listed(ALL):
        name = parse(tool.canonical)
        if id(tool) in selected:
            hub.fleet.selected.check(selection, name, TENANT)
            continue
        with pytest.raises(ToolError) as caught:
            hub.fleet.selected.check(selection, name, TENANT)
        wrong_kind = is_selected(tool, Selection(nodes=selection.nodes, tags=selection.tags))
        assert caught.value.failure is (Failure.NAME_UNKNOWN if wrong_kind else Failure.SAFETY_DENIED)


def test_another_tenants_nodes_cannot_be_selected(hub: Hub) -> None:
    foreign = NODES[7]
    for nodes in ((foreign,), (foreign[:12] + "zzz",)):
        with pytest.raises(UnknownNodeError):
            hub.fleet.selected.listed(ALL, Selection(nodes=nodes))
    own = hub.fleet.selected.listed(OTHERS, Selection(nodes=(foreign,)))
    assert {tool.node_id for tool in own} == {foreign}


# --- versions -------------------------------------------------------------------------------------------

TAGGED = Selection(tags=("site=north",))
OF_KINDS = Selection(View.KINDS)


@pytest.fixture
def own(tmp_path: Path, registry: SchemaRegistry) -> Iterator[Hub]:
    hub = Hub(tmp_path, registry)
    hub.connect(hub.ca.issue(), capabilities=[METRICS])
    hub.fleet.rename({NODE_ID: NodeName(TENANT, "barn", ("site=north",))})
    yield hub
    hub.close()


def versions(selected: SelectedTools) -> list[object]:
    return [selected.version(READERS, selection) for selection in (WHOLE_FLEET, TAGGED, OF_KINDS)]


def test_a_tag_changes_the_version_of_what_tags_select_and_no_other(own: Hub) -> None:
    whole, tagged, kinds = versions(own.fleet.selected)
    own.fleet.rename({NODE_ID: NodeName(TENANT, "barn", ("site=south",))})
    after = versions(own.fleet.selected)
    assert (after[0], after[2]) == (whole, kinds)
    assert after[1] != tagged


def test_a_node_changes_the_version_of_the_kinds_only_if_it_offers_another(own: Hub) -> None:
    whole, _, kinds = versions(own.fleet.selected)
    other = own.ca.issue(OTHER_NODE_ID)
    own.connect(other, capabilities=[METRICS])
    more = versions(own.fleet.selected)
    assert more[0] != whole
    assert more[2] == kinds
    own.connect(other, capabilities=[METRICS, ECHO], issued_at_ms=own.clock() + 1)
    assert versions(own.fleet.selected)[2] != kinds


def test_a_selection_that_fits_no_node_has_a_version(own: Hub) -> None:
    for view in View:
        nowhere = Selection(view, nodes=("nowhere",))
        before = own.fleet.selected.version(READERS, nowhere)
        own.fleet.rename({NODE_ID: NodeName(TENANT, "nowhere")})
        assert own.fleet.selected.version(READERS, nowhere) != before
        own.fleet.rename({NODE_ID: NodeName(TENANT, "barn")})
