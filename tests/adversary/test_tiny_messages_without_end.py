"""Attacker: an enrolled node, or a stranger. Tried: the smallest text frames that do not end a session, as
fast as they go: answers to commands that never were.

What must happen: they wait for their turn unparsed, and a node that stays above its rate is cut off; a
stranger is closed at the first one.
"""

import pytest

from relay.http.websocket_protocol import FRAMES_AT_ONCE
from tests.fakes.flood import answered_until_cut
from tests.fakes.raw_websocket import ws_frame
from tests.fakes.served_relay import HERE, ServedRelay
from tests.fakes.signer import SimulatedNode

pytestmark = pytest.mark.asyncio(loop_scope="module")

BEHIND_S = 0.1
TINY = ws_frame(b'{"type":"cmd_ack"}')
MANY = 20_000


async def test_a_node_is_cut_off(
    relay: ServedRelay, node: SimulatedNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("relay.http.websocket_protocol.MAX_BEHIND_S", BEHIND_S)
    reader, writer = await relay.admitted(node)
    await answered_until_cut(reader, writer, TINY * MANY)
    await relay.until_idle()
    refusals = relay.refusals()
    assert ("session_broken", node.node_id, "flooded", 1) in refusals
    dropped = [
        count for event, _, reason, count in refusals if (event, reason) == ("frame_dropped", "malformed")
    ]
    assert 0 < sum(dropped) <= FRAMES_AT_ONCE + 5


async def test_a_stranger_is_closed_at_the_first(relay: ServedRelay) -> None:
    reader, writer = await relay.upgraded()
    await answered_until_cut(reader, writer, TINY * MANY)
    await relay.until_idle()
    assert [(event, source, count) for event, source, _, count in relay.refusals()] == [
        ("node_refused", HERE, 1)
    ]
