"""Attacker: a node that was admitted, or an intruder on its connection. Tried: a second ``auth``, as another
node or as itself, after the welcome and in the same breath as the first; and a first one that answers
nothing.

What must happen: 4009, and the session is over; the other identity is not even read.
"""

import json
from collections.abc import Mapping
from typing import Any

import pytest

from tests.fakes.frames import message_id
from tests.fakes.served_relay import HERE, ServedRelay, auth_for
from tests.fakes.signer import OTHER_NODE_ID, TENANT, SimulatedNode

pytestmark = pytest.mark.asyncio(loop_scope="module")


def again(payload: Mapping[str, Any], answers: str) -> str:
    """Return the frame of a further ``auth``."""
    return json.dumps({"type": "auth", "msg_id": message_id(9), "in_reply_to": answers, "payload": payload})


@pytest.mark.parametrize("node_id", [None, OTHER_NODE_ID], ids=["as itself", "as another"])
async def test_who_is_welcome_cannot_present_himself_again(
    relay: ServedRelay, node: SimulatedNode, node_id: str | None
) -> None:
    second = relay.hub.ca.issue(node_id) if node_id else node
    async with relay.end(node) as end:
        challenge = await end.receive("challenge")
        await end.send("auth", auth_for(node, challenge), challenge.msg_id)
        await end.receive("welcome")
        await end.send_raw(again(auth_for(second, challenge), challenge.msg_id))
        assert await end.until_closed() == (4009, [])
    assert [known.node_id for known in relay.hub.fleet.nodes_of(TENANT)] == [node.node_id]


async def test_of_two_answers_in_one_breath_the_second_ends_the_session(
    relay: ServedRelay, node: SimulatedNode
) -> None:
    other = relay.hub.ca.issue(OTHER_NODE_ID)
    async with relay.end(node) as end:
        challenge = await end.receive("challenge")
        await end.send("auth", auth_for(node, challenge), challenge.msg_id)
        await end.send_raw(again(auth_for(other, challenge), challenge.msg_id))
        code, frames = await end.until_closed()
        assert (code, [frame.type for frame in frames]) == (4009, ["welcome"])
    assert [known.node_id for known in relay.hub.fleet.nodes_of(TENANT)] == [node.node_id]


async def test_an_answer_to_nothing_that_was_asked_admits_no_node(
    relay: ServedRelay, node: SimulatedNode
) -> None:
    async with relay.end(node) as end:
        challenge = await end.receive("challenge")
        await end.send_raw(again(auth_for(node, challenge), message_id(7)))
        assert await end.until_closed() == (4009, [])
    assert relay.refusals() == [("node_refused", HERE, "protocol", 1)]


async def test_the_second_answer_stands_in_the_audit(relay: ServedRelay, node: SimulatedNode) -> None:
    async with relay.end(node) as end:
        challenge = await end.receive("challenge")
        await end.send("auth", auth_for(node, challenge), challenge.msg_id)
        await end.receive("welcome")
        await end.send_raw(again(auth_for(node, challenge), challenge.msg_id))
        await end.until_closed()
    assert [(source, count) for _, source, _, count in relay.refusals()] == [(node.node_id, 1)]
