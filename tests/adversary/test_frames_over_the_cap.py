"""Attacker: a node that was admitted. Tried: a frame of more than 256 KiB, whole, in fragments that are each
small, in more fragments than any client needs, and announced in its header but never sent; and a compressed
one, that would unfold to more.

What must happen: 1009 (1002 for compression, which was not negotiated; nothing at all for a flood of
fragments), and the session is over. A frame of just 256 KiB passes.
"""

import pytest

from relay.http.websocket_protocol import MAX_FRAGMENTS
from schemas.frames import MAX_FRAME_BYTES
from tests.fakes.frames import frame_text
from tests.fakes.raw_websocket import until_cut, ws_frame
from tests.fakes.served_relay import ServedRelay
from tests.fakes.signer import TENANT, SimulatedNode

pytestmark = pytest.mark.asyncio(loop_scope="module")

_RSV1 = 0x40
_CONTINUATION = 0


def connected(relay: ServedRelay) -> list[bool]:
    return [known.connected for known in relay.hub.fleet.nodes_of(TENANT)]


async def test_a_frame_of_just_the_cap_passes(relay: ServedRelay, node: SimulatedNode) -> None:
    async with relay.session(node) as end:
        await end.send_raw(frame_text("heartbeat").ljust(MAX_FRAME_BYTES))
        # The acknowledgement answers nothing that this end knows of, so its machine drops it.
        with pytest.raises(AssertionError):
            await end.receive()
        assert connected(relay) == [True]


def whole() -> bytes:
    return ws_frame(frame_text("heartbeat").ljust(MAX_FRAME_BYTES + 1).encode())


def announced() -> bytes:
    return ws_frame(bytes(MAX_FRAME_BYTES + 1))[:10]


def enormous() -> bytes:
    return bytes([0x81, 0xFF]) + (2**63 - 1).to_bytes(8, "big")


def fragments() -> bytes:
    part = b" " * (MAX_FRAME_BYTES // 4)
    first = ws_frame(part, fin=False)
    return first + ws_frame(part, opcode=_CONTINUATION, fin=False) * 3 + ws_frame(b" ", opcode=_CONTINUATION)


def compressed() -> bytes:
    return ws_frame(bytes.fromhex("ab56ca48cdc9c95700000000ffff"), reserved=_RSV1)


@pytest.mark.parametrize(
    ("frame", "code"),
    [
        pytest.param(whole(), 1009, id="whole"),
        pytest.param(announced(), 1009, id="announced"),
        pytest.param(enormous(), 1009, id="announced beyond all memory"),
        pytest.param(fragments(), 1009, id="in fragments"),
        pytest.param(compressed(), 1002, id="compressed"),
        pytest.param(
            ws_frame(b" ", fin=False) + ws_frame(b" ", opcode=_CONTINUATION, fin=False) * (MAX_FRAGMENTS + 1),
            None,
            id="in too many fragments",
        ),
        pytest.param(ws_frame(b" ", fin=False) + ws_frame(b" ", fin=False), 1002, id="begun twice"),
        pytest.param(ws_frame(b" ", opcode=_CONTINUATION), 1002, id="continued, but never begun"),
    ],
)
async def test_a_frame_over_the_cap_ends_the_session(
    relay: ServedRelay, node: SimulatedNode, frame: bytes, code: int | None
) -> None:
    reader, writer = await relay.admitted(node)
    assert connected(relay) == [True]
    writer.write(frame)
    assert await until_cut(reader, writer) == code
    await relay.until_idle()
    assert connected(relay) == [False]


async def test_a_frame_over_the_cap_stands_in_the_audit(relay: ServedRelay, node: SimulatedNode) -> None:
    reader, writer = await relay.admitted(node)
    writer.write(whole())
    await until_cut(reader, writer)
    await relay.until_idle()
    assert [(source, count) for _, source, _, count in relay.refusals()] == [(node.node_id, 1)]
