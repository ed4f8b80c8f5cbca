"""Attacker: an enrolled node, or a stranger. Tried: pongs that answer no ping, as fast as possible, with
as much in them as a control frame holds.

What must happen: the connection is cut off after a burst, of a stranger after a handful, and the audit says
why.
"""

import pytest

from tests.fakes.flood import answered_until_cut
from tests.fakes.raw_websocket import ws_frame
from tests.fakes.served_relay import HERE, ServedRelay
from tests.fakes.signer import SimulatedNode

pytestmark = pytest.mark.asyncio(loop_scope="module")

MANY = 10_000


@pytest.mark.parametrize("payload", [b"", b"x" * 125], ids=["empty", "full"])
async def test_a_node_is_cut_off(relay: ServedRelay, node: SimulatedNode, payload: bytes) -> None:
    reader, writer = await relay.admitted(node)
    await answered_until_cut(reader, writer, ws_frame(payload, opcode=10) * MANY)
    await relay.until_idle()
    assert relay.refusals() == [("session_broken", node.node_id, "flooded", 1)]


async def test_a_stranger_is_cut_off(relay: ServedRelay) -> None:
    reader, writer = await relay.upgraded()
    # Few enough bytes: it is the frames that are too many.
    await answered_until_cut(reader, writer, ws_frame(b"", opcode=10) * 9)
    await relay.until_idle()
    assert relay.refusals() == [("node_refused", HERE, "flooded", 1)]
