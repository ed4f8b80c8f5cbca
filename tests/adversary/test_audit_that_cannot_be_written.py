"""Attacker: an agent that has filled the relay's disk, so as to act without a trace. Tried: calls, good and
bad, and refusals, while not a line of the audit can be written.

What must happen: ``E_INTERNAL``, and the node never sees a command; when there is space again the next call
succeeds by itself, and its two lines and the counts of what was refused meanwhile are there.
"""

import asyncio

import pytest

from tests.fakes.disk import full_disk
from tests.fakes.frames import PAYLOADS
from tests.fakes.node_end import NodeEnd
from tests.fakes.served_relay import HERE, ServedRelay
from tests.fakes.signer import NODE_ID, NOW_MS, SimulatedNode

pytestmark = pytest.mark.asyncio(loop_scope="module")

ECHO_NAME = f"sysecho.{NODE_ID}.echo.invoke"
RESULT = {"message": "ping", "received_at_ms": NOW_MS, "node_id": NODE_ID}


async def saw_nothing(end: NodeEnd) -> None:
    """Check that no command has come: a heartbeat is answered in order."""
    await end.send("heartbeat", PAYLOADS["heartbeat"])
    await end.receive("heartbeat_ack")


async def test_what_cannot_be_recorded_is_not_done_until_it_can(
    relay: ServedRelay, node: SimulatedNode
) -> None:
    async with relay.session(node) as end:
        with full_disk():
            for _ in range(3):
                envelope = (await relay.call(ECHO_NAME)).error()
                assert envelope["code"] == "E_INTERNAL"
                assert envelope["message"] == "The call could not be recorded, so it was not made."
            assert (await relay.ask("GET /readyz")).status == 503
            await saw_nothing(end)
        assert relay.calls() == []
        call = asyncio.create_task(relay.call(ECHO_NAME))
        await end.acknowledge(await end.receive("cmd"), RESULT)
        assert (await call).json()["result"]["structuredContent"] == RESULT
    assert relay.calls() == [("allow", "ok", NODE_ID), ("ok", "ok", NODE_ID)]
    assert (await relay.ask("GET /readyz")).status == 200


async def test_a_refusal_that_cannot_be_recorded_is_refused_all_the_same(
    relay: ServedRelay, node: SimulatedNode
) -> None:
    async with relay.session(node) as end:
        with full_disk():
            reply = await relay.call(ECHO_NAME, relay.hub.token(tenant="globex"))
            assert reply.error()["code"] == "E_INTERNAL"
            assert (await relay.mcp("tools/list", token="x")).status == 401
            await saw_nothing(end)
            assert relay.refusals() == []
    assert relay.refusals() == [("token_refused", HERE, "malformed", 1)]


async def test_a_disk_that_fills_while_a_node_works_does_not_make_the_answer_a_lie(
    relay: ServedRelay, node: SimulatedNode
) -> None:
    async with relay.session(node) as end:
        call = asyncio.create_task(relay.call(ECHO_NAME))
        command = await end.receive("cmd")
        with full_disk():
            await end.acknowledge(command, RESULT)
            assert (await call).json()["result"]["structuredContent"] == RESULT
            assert (await relay.call(ECHO_NAME)).error()["code"] == "E_INTERNAL"
            await saw_nothing(end)
    assert relay.calls() == [("allow", "ok", NODE_ID)]
