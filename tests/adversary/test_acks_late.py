"""Attacker: a node that answers when it suits it. Tried: an answer after the deadline, when the caller has
got the error that the time is up; it must neither reach that caller nor the next caller.

What must happen: ``E_DEADLINE_EXCEEDED`` for the caller, the late answer in a ``frame_dropped`` line, the
session lives on.
"""

import asyncio

import pytest

from tests.fakes.served_relay import ServedRelay
from tests.fakes.signer import ECHO, NODE_ID, NOW_MS, SimulatedNode

pytestmark = pytest.mark.asyncio(loop_scope="module")

RESULT = {"message": "ping", "received_at_ms": NOW_MS, "node_id": NODE_ID}
ECHO_NAME = f"sysecho.{NODE_ID}.echo.invoke"
HASTY = {**ECHO, "constraints": {**ECHO["constraints"], "deadline_ms_default": 50}}


async def test_an_answer_after_the_deadline_reaches_no_caller(
    relay: ServedRelay, node: SimulatedNode
) -> None:
    async with relay.session(node, capabilities=[HASTY]) as end:
        call = asyncio.create_task(relay.call(ECHO_NAME))
        command = await end.receive("cmd")
        assert (await call).error()["code"] == "E_DEADLINE_EXCEEDED"
        cancelled = await end.receive("cmd_cancel")
        assert (cancelled.in_reply_to, cancelled.payload["reason"]) == (command.msg_id, "deadline")
        await end.acknowledge(command, RESULT)
        await relay.hub.lines.until("frame dropped")
        # The next caller has its own command, which the late answer has not touched.
        again = asyncio.create_task(relay.call(ECHO_NAME, message="two"))
        following = await end.receive("cmd")
        await end.acknowledge(following, {**RESULT, "message": "two"})
        assert (await again).json()["result"]["structuredContent"]["message"] == "two"
    assert relay.refusals() == [("frame_dropped", NODE_ID, "unasked", 1)]
    assert relay.calls() == [
        ("allow", "ok", NODE_ID),
        ("error", "E_DEADLINE_EXCEEDED", NODE_ID),
        ("allow", "ok", NODE_ID),
        ("ok", "ok", NODE_ID),
    ]
