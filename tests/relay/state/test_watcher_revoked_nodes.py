"""Nodes that an operator revokes, moves or replaces: sessions, tools and calls end at the next poll."""

import asyncio
import json
from contextlib import suppress

import pytest

from schemas.errors import Failure
from tests.fakes.signer import NODE_ID, OTHER_NODE_ID, key_named
from tests.fakes.watched_relay import BOUND_S, READERS, Stage, code_of, failure, goes_on

pytestmark = [pytest.mark.integration, pytest.mark.asyncio(loop_scope="module")]


async def test_a_node_that_comes_to_another_tenant_is_audited_once(stage: Stage) -> None:
    before = stage.real.node(tenant="acme")
    await stage.watch.poll()
    after = stage.real.node(tenant="globex", replace=True)
    for _ in range(2):
        await stage.watch.poll()
    assert stage.events() == [
        {"event": "leaf_revoked", "kid": before.kid},
        {"event": "tenant_changed", "node_id": NODE_ID, "tenant": "globex", "kid": after.kid},
    ]


@pytest.mark.parametrize("by", ["node", "kid"])
async def test_what_an_operator_revokes_is_shut_out_at_the_next_look(stage: Stage, by: str) -> None:
    node, other = stage.real.node(), stage.real.node(OTHER_NODE_ID)
    async with stage.session(node) as end, stage.session(other) as others_end:
        calling = stage.call(node)
        await end.receive("cmd")
        stage.real.as_operator().revoke(node.node_id if by == "node" else node.kid)
        assert stage.listed() == {NODE_ID, OTHER_NODE_ID}
        await stage.watch.poll()
        assert stage.listed() == {OTHER_NODE_ID}
        assert await code_of(calling) == "E_ATTESTATION_FAILED"
        code, frames = await end.until_closed()
        assert (code, [frame.payload for frame in frames]) == (4003, [{"reason": "revoked"}])
        assert failure(stage.hub, node) is Failure.ATTESTATION_FAILED
        assert await code_of(stage.call(node)) == "E_ATTESTATION_FAILED"
        await goes_on(others_end)
    assert stage.events() == [{"event": "leaf_revoked", "kid": node.kid}]
    assert stage.hub.counted("sessions_total", event="shut_out") == 1
    assert [line["outcome"] for line in stage.hub.audited() if "outcome" in line] == ["error"]


async def test_a_revoked_node_does_not_come_back(stage: Stage) -> None:
    node = stage.real.node()
    async with stage.session(node) as end:
        stage.real.as_operator().revoke(NODE_ID)
        await stage.watch.poll()
        await end.until_closed()
    stage.hub.fleet.offer_identity(NODE_ID, node.leaf_pem)
    wire = node.manifest(issued_at_ms=stage.hub.clock.advance(1))
    stage.hub.fleet.offer_manifest(NODE_ID, wire, "broker")
    assert stage.listed() == set()
    assert failure(stage.hub, node) is Failure.ATTESTATION_FAILED
    with pytest.raises(AssertionError):
        async with stage.session(node):
            raise NotImplementedError


async def test_a_node_that_is_not_connected_is_gone_too(stage: Stage) -> None:
    node = stage.real.node()
    stage.hub.announce(node)
    assert failure(stage.hub, node) is None
    stage.real.as_operator().revoke(NODE_ID)
    await stage.watch.poll()
    assert failure(stage.hub, node) is Failure.ATTESTATION_FAILED


async def test_a_session_that_waits_to_be_resumed_cannot_be(stage: Stage) -> None:
    node = stage.real.node()
    async with stage.session(node) as end:
        calling = stage.call(node)
        await end.receive("cmd")
    async with asyncio.timeout(BOUND_S):
        while stage.hub.counted("nodes_connected"):  # noqa: ASYNC110 - there is no event for it
            await asyncio.sleep(0)
    stage.real.as_operator().revoke(NODE_ID)
    await stage.watch.poll()
    assert await code_of(calling) == "E_ATTESTATION_FAILED"


async def test_a_node_that_renewed_goes_on_without_its_old_leaf(stage: Stage) -> None:
    node = stage.real.node()
    async with stage.session(node) as end:
        fresh = stage.real.renewed(node)
        stage.hub.fleet.offer_identity(NODE_ID, fresh.leaf_pem)
        await end.send("announce", json.loads(fresh.manifest(issued_at_ms=stage.hub.clock.advance(1))))
        await end.receive("announce_ack")
        stage.real.as_operator().revoke(node.kid)
        await stage.watch.poll()
        await goes_on(end)
        assert stage.listed() == {NODE_ID}
        stage.real.as_operator().revoke(fresh.kid)
        await stage.watch.poll()
        assert (await end.until_closed())[0] == 4003
    assert stage.listed() == set()


async def test_a_node_that_was_given_another_key_comes_in_with_that_alone(stage: Stage) -> None:
    node = stage.real.node()
    async with stage.session(node) as end:
        fresh = stage.real.node(key=key_named("another key"), replace=True)
        await stage.watch.poll()
        assert (await end.until_closed())[0] == 4003
    async with stage.session(fresh) as end:
        await goes_on(end)
        assert stage.listed() == {NODE_ID}
        assert failure(stage.hub, fresh) is None


async def test_who_listens_is_told_at_once_and_does_not_wait_for_the_next_second(stage: Stage) -> None:
    heard = asyncio.Event()

    async def listener() -> None:
        heard.set()

    node = stage.real.node()
    stage.hub.connect(node)
    stage.notifier.listen(READERS, listener)
    task = asyncio.create_task(stage.notifier.run())  # looks every thousand seconds unless it is woken
    stage.real.as_operator().revoke(NODE_ID)
    await stage.watch.poll()
    await asyncio.wait_for(heard.wait(), BOUND_S)
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task


async def test_what_needs_to_know_of_leaves_is_told_of_every_change_and_of_nothing_else(stage: Stage) -> None:
    await stage.poll()
    await stage.poll()
    assert stage.leaves_looked_at == 1  # as it began
    stage.real.node()
    await stage.poll()
    assert stage.leaves_looked_at == 2
    stage.real.as_operator().revoke(NODE_ID)
    await stage.poll()
    await stage.poll()
    assert stage.leaves_looked_at == 3
    assert len(stage.events()) == 1


async def test_a_node_that_leaves_for_good_is_in_the_audit_as_revoked(stage: Stage) -> None:
    node = stage.real.node()
    async with stage.session(node) as end:
        await end.send("retire", {})
        assert (await end.until_closed())[0] == 4003
    await stage.watch.poll()
    assert [event["event"] for event in stage.events()] == ["retired", "leaf_revoked"]
    assert failure(stage.hub, node) is Failure.ATTESTATION_FAILED
