import pytest

from relay.fleet.node_record import Where
from relay.fleet.selection import WHOLE_FLEET, Selection
from relay.state.names import NodeName
from relay.streams.caller_tools.registry import Nodes
from schemas.errors import Failure, ToolError
from tests.fakes.caller_stage import CallerStage
from tests.fakes.signer import TENANT


def failure(nodes: Nodes, reference: str, selection: Selection = WHOLE_FLEET) -> ToolError:
    with pytest.raises(ToolError) as caught:
        nodes.find(TENANT, reference, selection)
    return caught.value


def test_a_node_is_found_by_its_id_a_prefix_or_its_label(stage: CallerStage) -> None:
    fleet, node = stage.hub.fleet, stage.node
    fleet.rename({node.node_id: NodeName(TENANT, "greenhouse pi")})
    for reference in (node.node_id, node.node_id[:8], "Greenhouse Pi"):
        found = Nodes(fleet).find(TENANT, reference, WHOLE_FLEET)
        assert (found.node_id, found.key) == (node.node_id, node.public_key)


def test_a_name_of_no_node_is_an_error_that_names_it(stage: CallerStage) -> None:
    error = failure(Nodes(stage.hub.fleet), "the shed\x1b")
    assert error.failure is Failure.SAFETY_DENIED
    assert error.envelope()["message"] == "No node is called 'the shed\\x1b'."
    assert "shed" not in str(error)


def test_a_node_that_is_not_connected_is_offline(stage: CallerStage) -> None:
    stage.hub.fleet.connection_changed(stage.node.node_id, Where.NOWHERE)
    assert failure(Nodes(stage.hub.fleet), stage.node.node_id).failure is Failure.NODE_OFFLINE


def test_a_node_that_the_url_leaves_out_is_not_found(stage: CallerStage) -> None:
    narrowed = Selection(tags=("site=north",))
    error = failure(Nodes(stage.hub.fleet), stage.node.node_id, narrowed)
    assert error.failure is Failure.SAFETY_DENIED


def test_a_node_is_trusted_by_its_key_in_its_tenant(stage: CallerStage) -> None:
    nodes, node = Nodes(stage.hub.fleet), stage.node
    assert nodes.is_trusted(TENANT, node.node_id, node.public_key)
    assert not nodes.is_trusted(TENANT, node.node_id, b"\0" * 32)
    assert not nodes.is_trusted("globex", node.node_id, node.public_key)
    assert not nodes.is_trusted(TENANT, "0" * 26, node.public_key)
