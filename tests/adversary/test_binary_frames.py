"""Attacker: a stranger, then a node. Tried: the bytes of a good frame in a binary message, and bytes that are
no UTF-8 in one that claims to be text; a parser that took either would be another than the one that is
tested.

What must happen: 4009 for what is binary, 1007 for what is no text; no session before, none after.
"""

import pytest

from tests.fakes.frames import frame_text
from tests.fakes.raw_websocket import until_cut, ws_frame
from tests.fakes.served_relay import HERE, ServedRelay
from tests.fakes.signer import TENANT, SimulatedNode

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_a_binary_frame_before_auth_is_refused(relay: ServedRelay, node: SimulatedNode) -> None:
    async with relay.end(node) as end:
        await end.receive("challenge")
        await end.send_raw(frame_text("auth", 2, answers=1).encode())
        assert await end.until_closed() == (4009, [])
    assert relay.refusals() == [("node_refused", HERE, "protocol", 1)]


async def test_a_binary_frame_of_a_node_ends_its_session(relay: ServedRelay, node: SimulatedNode) -> None:
    async with relay.session(node) as end:
        await end.send_raw(frame_text("heartbeat").encode())
        assert await end.until_closed() == (4009, [])
        line = await relay.hub.lines.until("node broke the protocol")
        assert line["reason"] == "a binary frame"
    assert [known.connected for known in relay.hub.fleet.nodes_of(TENANT)] == [False]


@pytest.mark.parametrize("payload", [b"\xff\xfe", b"\xc3", b"\xed\xa0\x80", b"\xc0\x80"])
async def test_a_text_frame_that_is_no_text_is_closed(relay: ServedRelay, payload: bytes) -> None:
    reader, writer = await relay.upgraded()
    writer.write(ws_frame(b'{"type":"auth' + payload))
    assert await until_cut(reader, writer) == 1007
    await relay.hub.lines.until("node refused")
    assert relay.refusals() == [("node_refused", HERE, "gone", 1)]
