"""What a URL selects of the fleet, and the pages and offers of a selection."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relay.auth.permissions import Rights
from relay.fleet.node_index import NodeIndex
from relay.fleet.node_names import NodeNames, UnknownNodeError
from relay.fleet.node_record import Where
from relay.fleet.reach import Reach
from relay.fleet.selection import WHOLE_FLEET, NodeCriteria, SelectedTools, Selection
from relay.fleet.tool_index import SEVERITY
from relay.fleet.tools import BEFORE_ALL, Tool
from schemas.addresses import View
from schemas.errors import Failure, ToolError
from schemas.labels import NodeName
from schemas.projection import parse
from schemas.registry import SchemaRegistry
from tests.fakes.fleet_tools import NodesOfTenants
from tests.fakes.hub import Hub
from tests.fakes.signer import ECHO, METRICS, NODE_ID, OTHER_NODE_ID, TENANT
from tests.fakes.view_stage import OTHER_TENANT, ViewStage, unclamped_registry

ACME, GLOBEX = "acme", "globex"
GREEN, BARN, BARE, FOREIGN = (f"01hzx9k3m4p7q8r9s0t1v2w3x{last}" for last in "abcd")


RIGHTS = Rights.of(ACME, ())


@pytest.fixture(scope="module")
def reach() -> Reach:
    names = NodeNames(NodesOfTenants({GREEN: ACME, BARN: ACME, BARE: ACME, FOREIGN: GLOBEX}))
    names.change(
        {
            GREEN: NodeName(ACME, "greenhouse", ("gateway", "site=north")),
            BARN: NodeName(ACME, "barn", ("site=south",)),
            FOREIGN: NodeName(GLOBEX, "vault", ("secret",)),
        }
    )
    return Reach(NodeIndex(), names)


@pytest.mark.parametrize(
    ("selection", "selected"),
    [
        pytest.param(WHOLE_FLEET, {GREEN, BARN, BARE}, id="all"),
        pytest.param(Selection(kinds=frozenset({"sys"})), {GREEN, BARN, BARE}, id="kinds are not nodes"),
        pytest.param(Selection(nodes=("Greenhouse", BARE)), {GREEN, BARE}, id="nodes"),
        pytest.param(Selection(tags=("site=south", "site=north")), {GREEN, BARN}, id="one value of a key"),
        pytest.param(Selection(tags=("site=south", "gateway")), set(), id="a value of each key"),
        pytest.param(Selection(tags=("site=north", "gateway")), {GREEN}, id="both tags"),
        pytest.param(Selection(nodes=("barn",), tags=("gateway",)), set(), id="both"),
        pytest.param(Selection(nodes=(GREEN, "barn"), tags=("gateway",)), {GREEN}, id="both, of two"),
    ],
)
def test_a_node_is_selected_by_its_names_and_its_tags(
    reach: Reach, selection: Selection, selected: set[str]
) -> None:
    everyone = {GREEN, BARN, BARE}
    assert {node_id for node_id in everyone if selection.admits_node(reach, RIGHTS, node_id)} == selected
    node_ids = selection.node_ids(reach, RIGHTS)
    assert (everyone if node_ids is None else node_ids) == selected


@pytest.mark.parametrize(
    "selection",
    [
        pytest.param(Selection(nodes=("nowhere",)), id="no such label"),
        pytest.param(Selection(nodes=("vault",)), id="another tenant's label"),
        pytest.param(Selection(nodes=(FOREIGN,)), id="another tenant's node"),
        pytest.param(Selection(tags=("nothing",)), id="no such tag"),
        pytest.param(Selection(tags=("secret",)), id="another tenant's tag"),
    ],
)
def test_what_fits_no_node_selects_none_and_is_an_error_where_it_is_listed(
    reach: Reach, selection: Selection, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        # A URL may have 64 such names: a search for those that are close took a tenth of a second for each.
        patched.setattr("relay.fleet.node_names.closest", Mock(side_effect=AssertionError))
        assert not any(selection.admits_node(reach, RIGHTS, node_id) for node_id in (GREEN, BARN, BARE))
    with pytest.raises(UnknownNodeError) as caught:
        selection.node_ids(reach, RIGHTS)
    assert caught.value.close == ()


def test_kinds_are_all_unless_some_are_named() -> None:
    assert WHOLE_FLEET.admits_kind("sys")
    assert Selection(kinds=frozenset({"sys"})).admits_kind("sys")
    assert not Selection(kinds=frozenset({"sys"})).admits_kind("sysecho")


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
def many(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hub]:
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


def by_search(many: Hub, rights: Rights, selection: Selection) -> list[Tool]:
    return [tool for tool in many.fleet.selected.listed(rights) if is_selected(tool, selection)]


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
    many: Hub, selection: Selection, rights: Rights, limit: int, few: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("relay.fleet.selection.FEW_NODES", few)
        seen: list[Tool] = []
        after = BEFORE_ALL
        while page := many.fleet.selected.listed(rights, selection, after, limit):
            assert len(page) <= limit
            seen += page
            after = page[-1].place
    assert seen == by_search(many, rights, selection)


@given(selection=selections, rights=st.sampled_from([READERS, ALL]))
def test_what_a_selection_offers_is_what_its_tools_are(
    many: Hub, selection: Selection, rights: Rights
) -> None:
    expected: dict[tuple[str, str], str] = {}
    for tool in by_search(many, rights, selection):
        known = expected.get(tool.kind_verb, tool.safety_class)
        expected[tool.kind_verb] = max(known, tool.safety_class, key=CLASSES.index)
    assert many.fleet.selected.offered(rights, selection) == expected


@given(selection=selections)
def test_a_call_is_let_through_where_its_tool_is_listed(many: Hub, selection: Selection) -> None:
    selected = set(map(id, by_search(many, ALL, selection)))
    for tool in many.fleet.selected.listed(ALL):
        name = parse(tool.canonical)
        if id(tool) in selected:
            many.fleet.selected.check(selection, name, ALL)
            continue
        with pytest.raises(ToolError) as caught:
            many.fleet.selected.check(selection, name, ALL)
        wrong_kind = is_selected(tool, Selection(nodes=selection.nodes, tags=selection.tags))
        assert caught.value.failure is (Failure.NAME_UNKNOWN if wrong_kind else Failure.SAFETY_DENIED)


def test_another_tenants_nodes_cannot_be_selected(many: Hub) -> None:
    foreign = NODES[7]
    for nodes in ((foreign,), (foreign[:12] + "zzz",)):
        with pytest.raises(UnknownNodeError):
            many.fleet.selected.listed(ALL, Selection(nodes=nodes))
    own = many.fleet.selected.listed(OTHERS, Selection(nodes=(foreign,)))
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


@pytest.fixture
def stage(hub: Hub) -> ViewStage:
    stage = ViewStage(hub)
    stage.node("barn", "site=north", "gateway", capabilities=[METRICS])
    stage.node("barn cellar", "site=south", capabilities=[ECHO])
    stage.hub.fleet.connection_changed(stage.node("yard", "site=north"), Where.NOWHERE)
    stage.node("far barn", "site=north", tenant=OTHER_TENANT)
    return stage


@pytest.mark.parametrize(
    ("wanted", "labels"),
    [
        pytest.param(NodeCriteria(), ["barn", "barn cellar", "yard"], id="all"),
        pytest.param(NodeCriteria(query="cellar barn"), ["barn cellar"], id="words"),
        pytest.param(NodeCriteria(kinds=frozenset({"system.metrics"})), ["barn"], id="kind"),
        pytest.param(NodeCriteria(tags=("site=north",)), ["barn", "yard"], id="tag"),
        pytest.param(NodeCriteria(tags=("site=north", "gateway")), ["barn"], id="tags"),
        pytest.param(NodeCriteria(tags=("none",)), [], id="no such tag"),
        pytest.param(NodeCriteria(online=False), ["yard"], id="offline"),
        pytest.param(
            NodeCriteria(query="barn", online=True, tags=("site=south",)), ["barn cellar"], id="together"
        ),
        pytest.param(
            NodeCriteria(selection=Selection(nodes=("yard", "barn"))), ["barn", "yard"], id="selected"
        ),
    ],
)
def test_nodes_are_found_by_all_that_is_wanted(
    stage: ViewStage, wanted: NodeCriteria, labels: list[str]
) -> None:
    fleet = stage.hub.fleet
    assert [fleet.names.label_of(node.node_id) for node in fleet.search.found(READERS, wanted)] == labels


def test_a_selection_of_a_node_that_there_is_not_is_an_error(stage: ViewStage) -> None:
    with pytest.raises(UnknownNodeError):
        stage.hub.fleet.search.found(READERS, NodeCriteria(selection=Selection(nodes=("far barn",))))
