from itertools import chain, repeat

import pytest

from relay.auth.permissions import Rights
from relay.fleet.selection import WHOLE_FLEET, Selection
from relay.fleet.usability import Decision
from relay.streams.caller_tools.registry import Nodes, SessionRegistry
from schemas.errors import Failure, ToolError
from tests.fakes.caller_stage import CallerStage
from tests.fakes.signer import NOW_MS, TENANT


async def test_an_id_names_the_time_and_is_drawn_again_while_a_session_has_it(stage: CallerStage) -> None:
    drawn = chain([b"\0\0\0\1", b"\0\0\0\1"], repeat(b"\0\0\0\2"))
    registry = SessionRegistry(lambda: NOW_MS, lambda _count: next(drawn))
    first = registry.new_id()
    assert first == "gogol_20251009_085320_00000001"
    await stage.open()
    (session,) = stage.hub.caller_sessions
    registry._sessions[first] = session  # noqa: SLF001 - a session of that id, which chance would not give
    assert registry.new_id() == "gogol_20251009_085320_00000002"


def failure(nodes: Nodes, reference: str, selection: Selection = WHOLE_FLEET) -> ToolError:
    with pytest.raises(ToolError) as caught:
        nodes.find(Rights.of(TENANT, ()), reference, selection)
    return caught.value


def test_a_name_of_no_node_is_an_error_that_names_it(stage: CallerStage) -> None:
    error = failure(Nodes(stage.hub.fleet), "the shed\x1b")
    assert error.failure is Failure.SAFETY_DENIED
    assert error.envelope()["message"] == "No node is called 'the shed\\x1b'."
    assert "shed" not in str(error)


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
    for decision in Decision:
        stage.hub.fleet.decide(decision, frozenset({node.node_id}))
        assert not nodes.is_trusted(TENANT, node.node_id, node.public_key)
        stage.hub.fleet.decide(decision, frozenset())
