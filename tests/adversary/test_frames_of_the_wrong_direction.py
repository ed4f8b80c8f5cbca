"""Attacker: a node that was admitted. Tried: to speak as the relay does: challenge, welcome, command, cancel,
acknowledge. A relay that took a node's ``cmd`` would run it; one that took a ``welcome`` would believe it.

What must happen: 4009, and the session is over.
"""

import pytest

from tests.fakes.frames import frame_text
from tests.fakes.served_relay import ServedRelay
from tests.fakes.signer import TENANT, SimulatedNode

pytestmark = pytest.mark.asyncio(loop_scope="module")

RELAYS_OWN = [
    "challenge",
    "welcome",
    "announce_ack",
    "heartbeat_ack",
    "cmd",
    "cmd_cancel",
    "telemetry_lease",
]


@pytest.mark.parametrize("type_", RELAYS_OWN)
async def test_a_node_that_speaks_as_the_relay_is_closed(
    relay: ServedRelay, node: SimulatedNode, type_: str
) -> None:
    async with relay.session(node) as end:
        await end.send_raw(frame_text(type_, 9, answers=1))
        assert await end.until_closed() == (4009, [])
        assert await relay.hub.lines.until("node broke the protocol")
    assert relay.calls() == []
    assert [known.connected for known in relay.hub.fleet.nodes_of(TENANT)] == [False]


async def test_a_frame_of_the_wrong_direction_stands_in_the_audit(
    relay: ServedRelay, node: SimulatedNode
) -> None:
    async with relay.session(node) as end:
        await end.send_raw(frame_text("cmd", 9))
        await end.until_closed()
    assert [(source, count) for _, source, _, count in relay.refusals()] == [(node.node_id, 1)]
