"""The search by itself; ``find_nodes`` is tested with the views."""

import pytest

from relay.fleet.node_names import UnknownNodeError
from relay.fleet.selection import NodeCriteria, Selection
from tests.fakes.hub import Hub
from tests.fakes.signer import ECHO, METRICS, TENANT
from tests.fakes.view_stage import OTHER_TENANT, ViewStage


@pytest.fixture
def stage(hub: Hub) -> ViewStage:
    stage = ViewStage(hub)
    stage.node("barn", "site=north", "gateway", capabilities=[METRICS])
    stage.node("barn cellar", "site=south", capabilities=[ECHO])
    stage.hub.fleet.set_connected(stage.node("yard", "site=north"), connected=False)
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
    assert [fleet.names.label_of(node.node_id) for node in fleet.search.found(TENANT, wanted)] == labels


def test_a_selection_of_a_node_that_there_is_not_is_an_error(stage: ViewStage) -> None:
    with pytest.raises(UnknownNodeError):
        stage.hub.fleet.search.found(TENANT, NodeCriteria(selection=Selection(nodes=("far barn",))))


def test_a_retired_node_is_not_found(stage: ViewStage) -> None:
    fleet = stage.hub.fleet
    fleet.retire(frozenset({fleet.names.resolve(TENANT, "yard")}), ())
    assert len(fleet.search.found(TENANT, NodeCriteria())) == 2
