"""Attacker: a node that was admitted, or an intruder on its connection.

Tried: to speak as the relay does (a relay that took a node's ``cmd`` would run it); a second ``auth``, as
another node or as itself; a binary message; frames of more than 256 KiB, whole, in fragments that are each
small, in more fragments than any client needs, or announced and never sent; and a compressed one, that would
unfold to more.

What must happen: 4009 (1009 for what is too large, 1002 for what breaks RFC 6455, nothing at all for a flood
of fragments), and the session is over; the audit has a line of it, and none if the node closes by such a code
itself. A frame of just 256 KiB passes.
"""

import json

import pytest

from relay.http.websocket_protocol import MAX_FRAGMENTS
from schemas.frames import MAX_FRAME_BYTES
from tests.fakes.frames import frame_text, message_id
from tests.fakes.raw_http import until_cut, ws_frame
from tests.fakes.served_relay import ServedRelay, auth_for
from tests.fakes.signer import OTHER_NODE_ID, TENANT, SimulatedNode

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
_RSV1 = 0x40
_CONTINUATION, _CLOSE = 0, 8
QUARTER = b" " * (MAX_FRAME_BYTES // 4)


def connected(relay: ServedRelay) -> list[bool]:
    return [known.connected for known in relay.hub.nodes_of(TENANT)]


def audited(relay: ServedRelay) -> list[tuple[str, int]]:
    return [(source, count) for _, source, _, count in relay.refusals()]


@pytest.mark.parametrize(
    "data",
    [
        *(pytest.param(frame_text(type_, 9, answers=1), id=type_) for type_ in RELAYS_OWN),
        pytest.param(frame_text("heartbeat").encode(), id="a binary message"),
    ],
)
async def test_a_node_that_speaks_as_the_relay_or_in_binary_is_closed(
    relay: ServedRelay, node: SimulatedNode, data: str | bytes
) -> None:
    async with relay.session(node) as end:
        await end.send_raw(data)
        assert await end.until_closed() == (4009, [])
        line = await relay.hub.lines.until("node broke the protocol")
    assert isinstance(data, str) or line["reason"] == "a binary frame"
    assert relay.calls() == []
    assert connected(relay) == [False]
    assert audited(relay) == [(node.node_id, 1)]


@pytest.mark.parametrize("node_id", [None, OTHER_NODE_ID], ids=["as itself", "as another"])
@pytest.mark.parametrize("at_once", [False, True], ids=["later", "in one breath"])
async def test_a_node_cannot_authenticate_again(
    relay: ServedRelay, node: SimulatedNode, node_id: str | None, *, at_once: bool
) -> None:
    second = relay.hub.ca.issue(node_id) if node_id else node
    async with relay.end(node) as end:
        challenge = await end.receive("challenge")
        await end.send("auth", auth_for(node, challenge), challenge.msg_id)
        if not at_once:
            await end.receive("welcome")
        again = {"type": "auth", "msg_id": message_id(9), "in_reply_to": challenge.msg_id}
        await end.send_raw(json.dumps({**again, "payload": auth_for(second, challenge)}))
        code, frames = await end.until_closed()
        assert (code, [frame.type for frame in frames]) == (4009, ["welcome"] if at_once else [])
    # The other identity is not even read.
    assert [known.node_id for known in relay.hub.nodes_of(TENANT)] == [node.node_id]
    assert audited(relay) == [(node.node_id, 1)]


async def test_a_frame_of_just_the_cap_passes(relay: ServedRelay, node: SimulatedNode) -> None:
    async with relay.session(node) as end:
        await end.send_raw(frame_text("heartbeat").ljust(MAX_FRAME_BYTES))
        # The acknowledgement answers nothing that this end knows of, so its machine drops it.
        with pytest.raises(AssertionError):
            await end.receive()
        assert connected(relay) == [True]


@pytest.mark.parametrize(
    ("frame", "code"),
    [
        pytest.param(ws_frame(frame_text("heartbeat").ljust(MAX_FRAME_BYTES + 1).encode()), 1009, id="whole"),
        pytest.param(ws_frame(bytes(MAX_FRAME_BYTES + 1))[:10], 1009, id="announced"),
        pytest.param(
            bytes([0x81, 0xFF]) + (2**63 - 1).to_bytes(8, "big"), 1009, id="announced beyond all memory"
        ),
        pytest.param(
            ws_frame(QUARTER, fin=False)
            + ws_frame(QUARTER, opcode=_CONTINUATION, fin=False) * 3
            + ws_frame(b" ", opcode=_CONTINUATION),
            1009,
            id="in fragments",
        ),
        pytest.param(
            ws_frame(bytes.fromhex("ab56ca48cdc9c95700000000ffff"), reserved=_RSV1), 1002, id="compressed"
        ),
        pytest.param(
            ws_frame(b" ", fin=False) + ws_frame(b" ", opcode=_CONTINUATION, fin=False) * (MAX_FRAGMENTS + 1),
            None,
            id="in too many fragments",
        ),
        pytest.param(ws_frame(b" ", fin=False) + ws_frame(b" ", fin=False), 1002, id="begun twice"),
        pytest.param(ws_frame(b" ", opcode=_CONTINUATION), 1002, id="continued, but never begun"),
        pytest.param(ws_frame(b"\xff"), 1007, id="no UTF-8"),
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
    assert audited(relay) == [(node.node_id, 1)]


@pytest.mark.parametrize("code", [1002, 1008, 1009])
async def test_a_code_that_the_node_itself_closes_with_says_nothing_about_it(
    relay: ServedRelay, node: SimulatedNode, code: int
) -> None:
    reader, writer = await relay.admitted(node)
    writer.write(ws_frame(code.to_bytes(2, "big"), opcode=_CLOSE))
    assert await until_cut(reader, writer) == code
    await relay.until_idle()
    assert audited(relay) == []
