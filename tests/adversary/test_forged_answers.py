"""Attacker: a node that was admitted, or another one, of the same tenant or not.

Tried: answers to commands that it was never sent, by ids made up, guessed or read; a second answer; one of an
earlier command, or after the deadline; one for another node's command; and a result that names another node.

What must happen: the first answer of the node that was asked is the answer. Each other is dropped and counted
in a ``frame_dropped`` line of the node that sent it, and its session lives on. A result that names another
node is ``E_INTERNAL`` for the caller, with nothing of it shown, logged or recorded.
"""

import asyncio
import json
from typing import Any

import pytest

from tests.fakes.frames import ERROR, PAYLOADS, message_id
from tests.fakes.node_end import NodeEnd
from tests.fakes.served_relay import ServedRelay
from tests.fakes.signer import ECHO, NODE_ID, NOW_MS, OTHER_NODE_ID, TENANT, SimulatedNode

pytestmark = pytest.mark.asyncio(loop_scope="module")

RESULT = {"message": "ping", "received_at_ms": NOW_MS, "node_id": NODE_ID}
FORGED = {"ok": True, "result": {**RESULT, "message": "forged"}}
ECHO_NAME = f"sysecho.{NODE_ID}.echo.invoke"
HASTY = {**ECHO, "constraints": {**ECHO["constraints"], "deadline_ms_default": 50}}
ANSWERED = [("allow", "ok", NODE_ID), ("ok", "ok", NODE_ID)]
MARK = "planted"


async def beat(end: NodeEnd) -> None:
    """Wait until the relay has read all that ``end`` has sent: it goes on listening to it."""
    await end.send("heartbeat", PAYLOADS["heartbeat"])
    await end.receive("heartbeat_ack")


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
        await beat(end)
    assert relay.refusals() == [("frame_dropped", NODE_ID, "unasked", 3)]
    assert relay.calls() == []


async def test_a_guessed_id_does_not_answer_the_command_that_waits(
    relay: ServedRelay, node: SimulatedNode
) -> None:
    async with relay.session(node) as end:
        call = asyncio.create_task(relay.call(ECHO_NAME))
        command = await end.receive("cmd")
        correlation_id = command.payload["correlation_id"]
        for msg_id in (neighbour(command.msg_id), message_id(7), correlation_id):
            await end.send("cmd_ack", FORGED, msg_id)
        await beat(end)
        await end.acknowledge(command, RESULT)
        assert (await call).json()["result"]["structuredContent"] == RESULT
    assert relay.refusals() == [("frame_dropped", NODE_ID, "unasked", 3)]
    assert relay.calls() == ANSWERED


async def test_only_the_first_answer_counts(relay: ServedRelay, node: SimulatedNode) -> None:
    async with relay.session(node) as end:
        call = asyncio.create_task(relay.call(ECHO_NAME))
        command = await end.receive("cmd")
        await end.acknowledge(command, RESULT)
        await end.acknowledge(command, {**RESULT, "message": "another"})
        await end.send("cmd_ack", {"ok": False, "error": ERROR}, command.msg_id)
        assert (await call).json()["result"]["structuredContent"] == RESULT
        await beat(end)
    assert relay.refusals() == [("frame_dropped", NODE_ID, "unasked", 2)]
    assert relay.calls() == ANSWERED


@pytest.mark.parametrize("late", [False, True], ids=["repeated", "after the deadline"])
async def test_an_answer_of_an_earlier_command_does_not_answer_the_next(
    relay: ServedRelay, node: SimulatedNode, *, late: bool
) -> None:
    async with relay.session(node, capabilities=[HASTY] if late else [ECHO]) as end:
        first = asyncio.create_task(relay.call(ECHO_NAME))
        earlier = await end.receive("cmd")
        if late:
            assert (await first).error()["code"] == "E_DEADLINE_EXCEEDED"
            cancelled = await end.receive("cmd_cancel")
            assert (cancelled.in_reply_to, cancelled.payload["reason"]) == (earlier.msg_id, "deadline")
            await end.acknowledge(earlier, RESULT)
            await relay.hub.lines.until("frame dropped")
        else:
            await end.acknowledge(earlier, RESULT)
            await first
        second = asyncio.create_task(relay.call(ECHO_NAME, message="two"))
        later = await end.receive("cmd")
        if not late:
            await end.acknowledge(earlier, RESULT)
            await relay.hub.lines.until("frame dropped")
        await end.acknowledge(later, {**RESULT, "message": "two"})
        assert (await second).json()["result"]["structuredContent"]["message"] == "two"
    assert relay.refusals() == [("frame_dropped", NODE_ID, "unasked", 1)]
    outcome = ("error", "E_DEADLINE_EXCEEDED", NODE_ID) if late else ANSWERED[1]
    assert relay.calls() == [ANSWERED[0], outcome, *ANSWERED]


@pytest.mark.parametrize("resumes", [False, True], ids=["on its own session", "as A's session resumed"])
@pytest.mark.parametrize("tenant", [TENANT, "globex"])
async def test_a_node_cannot_answer_for_another(
    relay: ServedRelay, node: SimulatedNode, tenant: str, *, resumes: bool
) -> None:
    thief = relay.hub.ca.issue(OTHER_NODE_ID, tenant)
    async with relay.session(node) as own, relay.end(thief) as other:
        welcome = await other.authenticate(resume=own.session_id if resumes else None)
        assert welcome.payload["resumed"] is False
        call = asyncio.create_task(relay.call(ECHO_NAME))
        command = await own.receive("cmd")
        await other.acknowledge(command, {**RESULT, "message": "stolen"})
        await relay.hub.lines.until("frame dropped")
        await own.acknowledge(command, RESULT)
        assert (await call).json()["result"]["structuredContent"] == RESULT
    assert relay.refusals() == [("frame_dropped", OTHER_NODE_ID, "unasked", 1)]
    assert relay.calls() == ANSWERED


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
    async with relay.session(node, capabilities=[HASTY]) as end:
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
