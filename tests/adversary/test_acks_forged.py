"""Attacker: a node that was admitted. Tried: answers to commands that it was never sent: to ids made up, to
ids guessed from the one it has seen, to its own frames; with nothing running, and while a real command
waits.

What must happen: each is dropped and counted in a ``frame_dropped`` line of that node; the session lives on,
and the real command gets the real answer.
"""

import asyncio

import pytest

from tests.fakes.frames import PAYLOADS, message_id
from tests.fakes.served_relay import ServedRelay
from tests.fakes.signer import NODE_ID, NOW_MS, SimulatedNode

pytestmark = pytest.mark.asyncio(loop_scope="module")

RESULT = {"message": "ping", "received_at_ms": NOW_MS, "node_id": NODE_ID}
FORGED = {"ok": True, "result": {**RESULT, "message": "forged"}}


def neighbour(msg_id: str) -> str:
    """Return the id that follows ``msg_id`` in the same millisecond, where there is one."""
    last = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"
    return msg_id[:-1] + last[(last.index(msg_id[-1]) + 1) % 32]


async def test_an_answer_to_what_was_never_asked_reaches_no_caller(
    relay: ServedRelay, node: SimulatedNode
) -> None:
    async with relay.session(node) as end:
        own = await end.send("heartbeat", PAYLOADS["heartbeat"])
        await end.receive("heartbeat_ack")
        for msg_id in (message_id(7), own, "7" + "Z" * 25):
            await end.send("cmd_ack", FORGED, msg_id)
        await end.send("heartbeat", PAYLOADS["heartbeat"])
        await end.receive("heartbeat_ack")
    assert relay.refusals() == [("frame_dropped", NODE_ID, "unasked", 3)]
    assert relay.calls() == []


async def test_a_guessed_id_does_not_answer_the_command_that_waits(
    relay: ServedRelay, node: SimulatedNode
) -> None:
    async with relay.session(node) as end:
        call = asyncio.create_task(relay.call(f"sysecho.{NODE_ID}.echo.invoke"))
        command = await end.receive("cmd")
        correlation_id = command.payload["correlation_id"]
        for msg_id in (neighbour(command.msg_id), message_id(7), correlation_id):
            await end.send("cmd_ack", FORGED, msg_id)
        await end.send("heartbeat", PAYLOADS["heartbeat"])
        await end.receive("heartbeat_ack")
        await end.acknowledge(command, RESULT)
        assert (await call).json()["result"]["structuredContent"] == RESULT
    assert relay.refusals() == [("frame_dropped", NODE_ID, "unasked", 3)]
    assert relay.calls() == [("allow", "ok", NODE_ID), ("ok", "ok", NODE_ID)]
