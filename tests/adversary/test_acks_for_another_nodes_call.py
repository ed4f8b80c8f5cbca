"""Attacker: node B, of the same tenant or of another. Tried: B answers the command that A was sent, with A's
``msg_id``, before A does; on B's session, and on a connection that calls itself a resumption of A's.

What must happen: B's answer is dropped and counted in a ``frame_dropped`` line of B, not of A; A's answer
counts.
"""

import asyncio

import pytest

from tests.fakes.served_relay import ServedRelay
from tests.fakes.signer import NODE_ID, NOW_MS, OTHER_NODE_ID, TENANT, SimulatedNode

pytestmark = pytest.mark.asyncio(loop_scope="module")

RESULT = {"message": "ping", "received_at_ms": NOW_MS, "node_id": NODE_ID}


@pytest.mark.parametrize("resumes", [False, True], ids=["on its own session", "as A's session resumed"])
@pytest.mark.parametrize("tenant", [TENANT, "globex"])
async def test_a_node_cannot_answer_for_another(
    relay: ServedRelay, node: SimulatedNode, tenant: str, *, resumes: bool
) -> None:
    thief = relay.hub.ca.issue(OTHER_NODE_ID, tenant)
    async with relay.session(node) as own, relay.end(thief) as other:
        welcome = await other.authenticate(resume=own.session_id if resumes else None)
        assert welcome.payload["resumed"] is False
        call = asyncio.create_task(relay.call(f"sysecho.{NODE_ID}.echo.invoke"))
        command = await own.receive("cmd")
        await other.acknowledge(command, {**RESULT, "message": "stolen"})
        await relay.hub.lines.until("frame dropped")
        await own.acknowledge(command, RESULT)
        assert (await call).json()["result"]["structuredContent"] == RESULT
    assert relay.refusals() == [("frame_dropped", OTHER_NODE_ID, "unasked", 1)]
    assert relay.calls() == [("allow", "ok", NODE_ID), ("ok", "ok", NODE_ID)]
