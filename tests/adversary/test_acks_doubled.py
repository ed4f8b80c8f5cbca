"""Attacker: a node that would take an answer back. Tried: a second and a third answer to a command, good, bad
and of another meaning; and the answer of an earlier command to a later one.

What must happen: the first answer is the answer; each further one is dropped and counted in a
``frame_dropped`` line.
"""

import asyncio

import pytest

from tests.fakes.frames import ERROR, PAYLOADS
from tests.fakes.served_relay import ServedRelay
from tests.fakes.signer import NODE_ID, NOW_MS, SimulatedNode

pytestmark = pytest.mark.asyncio(loop_scope="module")

RESULT = {"message": "ping", "received_at_ms": NOW_MS, "node_id": NODE_ID}
ECHO_NAME = f"sysecho.{NODE_ID}.echo.invoke"


async def test_only_the_first_answer_counts(relay: ServedRelay, node: SimulatedNode) -> None:
    async with relay.session(node) as end:
        call = asyncio.create_task(relay.call(ECHO_NAME))
        command = await end.receive("cmd")
        await end.acknowledge(command, RESULT)
        await end.acknowledge(command, {**RESULT, "message": "another"})
        await end.send("cmd_ack", {"ok": False, "error": ERROR}, command.msg_id)
        assert (await call).json()["result"]["structuredContent"] == RESULT
        await end.send("heartbeat", PAYLOADS["heartbeat"])
        await end.receive("heartbeat_ack")
    assert relay.refusals() == [("frame_dropped", NODE_ID, "unasked", 2)]
    assert relay.calls() == [("allow", "ok", NODE_ID), ("ok", "ok", NODE_ID)]


async def test_an_answer_that_was_used_does_not_answer_the_next_command(
    relay: ServedRelay, node: SimulatedNode
) -> None:
    async with relay.session(node) as end:
        first = asyncio.create_task(relay.call(ECHO_NAME))
        earlier = await end.receive("cmd")
        await end.acknowledge(earlier, RESULT)
        await first
        second = asyncio.create_task(relay.call(ECHO_NAME, message="two"))
        later = await end.receive("cmd")
        await end.acknowledge(earlier, RESULT)
        await relay.hub.lines.until("frame dropped")
        await end.acknowledge(later, {**RESULT, "message": "two"})
        assert (await second).json()["result"]["structuredContent"]["message"] == "two"
    assert relay.refusals() == [("frame_dropped", NODE_ID, "unasked", 1)]
