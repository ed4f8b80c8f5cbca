"""Attacker: a node that would have its answer taken for another's. Tried: a result that names another node,
none, the right one in another spelling, or the right one twice.

What must happen: ``E_INTERNAL`` for the caller, with nothing of the result; the outcome is in the audit
under the node that was called.
"""

import asyncio
import json
from typing import Any

import pytest

from tests.fakes.served_relay import ServedRelay
from tests.fakes.signer import ECHO, NODE_ID, NOW_MS, OTHER_NODE_ID, SimulatedNode

pytestmark = pytest.mark.asyncio(loop_scope="module")

MARK = "planted"
ECHO_NAME = f"sysecho.{NODE_ID}.echo.invoke"


@pytest.mark.parametrize(
    "members",
    [
        pytest.param({"node_id": OTHER_NODE_ID}, id="another"),
        pytest.param({"node_id": NODE_ID.upper()}, id="in capitals"),
        pytest.param({"node_id": f"{NODE_ID} "}, id="and a space"),
        pytest.param({"node_id": [NODE_ID]}, id="in a list"),
        pytest.param({"node_id": None}, id="null"),
        pytest.param({}, id="none"),
        pytest.param({"node_id": NODE_ID, "on_behalf_of": OTHER_NODE_ID}, id="and another besides"),
    ],
)
async def test_a_result_that_names_another_node_reaches_no_caller(
    relay: ServedRelay, node: SimulatedNode, members: dict[str, Any]
) -> None:
    async with relay.session(node) as end:
        call = asyncio.create_task(relay.call(ECHO_NAME))
        await end.acknowledge(
            await end.receive("cmd"), {"message": MARK, "received_at_ms": NOW_MS, **members}
        )
        reply = await call
    assert reply.error()["code"] == "E_INTERNAL"
    assert MARK.encode() not in reply.body
    assert OTHER_NODE_ID.encode() not in reply.body
    assert relay.calls() == [("allow", "ok", NODE_ID), ("error", "E_INTERNAL", NODE_ID)]
    assert MARK not in relay.hub.audit_file.read_text("ascii") + relay.hub.lines.getvalue()


async def test_a_result_that_names_its_node_twice_is_no_answer(
    relay: ServedRelay, node: SimulatedNode
) -> None:
    hasty = {**ECHO, "constraints": {**ECHO["constraints"], "deadline_ms_default": 50}}
    async with relay.session(node, capabilities=[hasty]) as end:
        call = asyncio.create_task(relay.call(ECHO_NAME))
        command = await end.receive("cmd")
        result = json.dumps({"message": MARK, "received_at_ms": NOW_MS, "node_id": OTHER_NODE_ID})
        twice = result.replace("}", f', "node_id": "{NODE_ID}"}}')
        ack = {"type": "cmd_ack", "msg_id": "0" * 26, "in_reply_to": command.msg_id}
        text = json.dumps({**ack, "payload": {"ok": True, "result": MARK}})
        await end.send_raw(text.replace(f'"{MARK}"', twice))
        # Duplicate keys are no JSON here: what such a frame means is undefined, and it ends the session.
        assert await end.until_closed() == (4009, [])
        reply = await call
    assert reply.error()["code"] == "E_DEADLINE_EXCEEDED"
    assert MARK.encode() not in reply.body
