"""Attacker: an enrolled node, or a stranger. Tried: empty pings as fast as they go, each of which a
WebSocket has to answer, and which never reach the code that reads messages.

What must happen: at most a burst of them is answered, of a stranger a handful, and the connection is cut
off; the audit says why.
"""

import pytest

from relay.http.websocket_protocol import FRAMES_AT_ONCE, FRAMES_BEFORE_ADMISSION
from tests.fakes.flood import answered_until_cut
from tests.fakes.raw_websocket import ws_frame
from tests.fakes.served_relay import HERE, ServedRelay
from tests.fakes.signer import SimulatedNode

pytestmark = pytest.mark.asyncio(loop_scope="module")

PING = ws_frame(b"", opcode=9)
MANY = 100_000


async def test_a_node_is_cut_off_after_a_burst(relay: ServedRelay, node: SimulatedNode) -> None:
    reader, writer = await relay.admitted(node)
    # What the bucket gains while the burst is parsed comes on top.
    assert await answered_until_cut(reader, writer, PING * MANY) <= FRAMES_AT_ONCE + 5
    await relay.until_idle()
    assert relay.refusals() == [("session_broken", node.node_id, "flooded", 1)]


async def test_a_stranger_is_cut_off_after_a_handful(relay: ServedRelay) -> None:
    reader, writer = await relay.upgraded()
    # Before them comes the challenge.
    assert await answered_until_cut(reader, writer, PING * 100) <= 1 + FRAMES_BEFORE_ADMISSION
    await relay.until_idle()
    assert relay.refusals() == [("node_refused", HERE, "flooded", 1)]
