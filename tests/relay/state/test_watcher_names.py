"""The names of nodes take effect as the operator changes them."""

import pytest

from relay.state.names import NameLedger
from schemas.errors import Failure
from tests.fakes.signer import NODE_ID, OTHER_NODE_ID, TENANT, key_named
from tests.fakes.watched_relay import Stage, failure

pytestmark = [pytest.mark.integration, pytest.mark.asyncio(loop_scope="module")]


async def test_what_the_operator_calls_a_node_is_in_effect_at_the_next_poll(stage: Stage) -> None:
    names = stage.hub.fleet.names
    stage.hub.announce(stage.real.node())
    stage.label(NODE_ID, "greenhouse pi")
    await stage.watch.poll()
    assert names.resolve(TENANT, "greenhouse pi") == NODE_ID
    stage.label(NODE_ID, "barn")
    await stage.watch.poll()
    await stage.watch.poll()
    assert names.label_of(NODE_ID) == "barn"
    assert len(stage.hub.lines.entries("node named")) == 2


async def test_a_node_that_is_revoked_is_in_no_list_and_one_that_is_forgotten_is_not_known(
    stage: Stage,
) -> None:
    node, other = stage.real.node(), stage.real.node(OTHER_NODE_ID)
    stage.hub.announce(node)
    stage.hub.announce(other)
    stage.label(NODE_ID, "greenhouse pi")
    stage.real.as_operator().revoke(NODE_ID)
    await stage.watch.poll()
    assert [each.node_id for each in stage.hub.fleet.nodes_of(TENANT)] == [OTHER_NODE_ID]
    assert stage.hub.fleet.tenant_of(NODE_ID) is not None
    NameLedger(stage.directory / "node_names.jsonl", stage.hub.clock).forget(NODE_ID)
    await stage.watch.poll()
    assert stage.hub.fleet.tenant_of(NODE_ID) is None
    assert stage.hub.fleet.names.label_of(NODE_ID) == ""
    assert failure(stage.hub, node) is Failure.SAFETY_DENIED
    stage.hub.fleet.offer_identity(NODE_ID, node.leaf_pem)
    assert stage.hub.fleet.tenant_of(NODE_ID) is None
    again = stage.real.node(key=key_named("another key"), replace=True)
    await stage.watch.poll()
    stage.hub.announce(again, issued_at_ms=stage.hub.clock.advance(1))
    assert failure(stage.hub, again) is None
    await stage.watch.poll()
    assert {each.node_id for each in stage.hub.fleet.nodes_of(TENANT)} == {NODE_ID, OTHER_NODE_ID}


async def test_a_node_that_is_forgotten_while_its_session_ends_is_forgotten_after_it(stage: Stage) -> None:
    async with stage.session(stage.real.node()) as end:
        stage.real.as_operator().revoke(NODE_ID)
        NameLedger(stage.directory / "node_names.jsonl", stage.hub.clock).forget(NODE_ID)
        await stage.watch.poll()
        assert (await end.until_closed())[0] == 4003
        assert stage.hub.fleet.tenant_of(NODE_ID) is None


async def test_names_survive_a_restart(stage: Stage) -> None:
    stage.label(NODE_ID, "greenhouse pi")
    stage.watching().begin()
    assert stage.hub.fleet.names.label_of(NODE_ID) == "greenhouse pi"


async def test_names_that_were_given_before_a_start_are_not_logged_at_it(stage: Stage) -> None:
    stage.label(NODE_ID, "greenhouse pi")
    stage.watching().begin()
    assert stage.hub.lines.entries("node named") == []
