"""Attacker: an enrolled node, or a stranger, as fast as it can.

Tried: empty pings, each of which a WebSocket has to answer, and which never reach the code that reads
messages; pongs that answer no ping; messages in many fragments that hold nothing, so that a count of messages
stays small; and the smallest text frames that do not end a session: answers to commands that never were.

What must happen: each frame and fragment counts. A node is cut off after a burst, or when it stays above its
rate for as long as its pongs may take; a stranger after a handful; and the audit says why.
"""

import asyncio

import pytest

from relay.http.websocket_protocol import FRAMES_AT_ONCE, FRAMES_BEFORE_ADMISSION
from tests.fakes.frames import frame_text
from tests.fakes.raw_http import read_ws_frame, ws_frame
from tests.fakes.served_relay import HERE, ServedRelay
from tests.fakes.signer import SimulatedNode

pytestmark = pytest.mark.asyncio(loop_scope="module")

BEHIND_S = 0.1
BOUND_S = 30
FRAGMENTS = 60
PING = ws_frame(b"", opcode=9)
TINY = ws_frame(b'{"type":"cmd_ack"}')
# One message in as many fragments as a message may have.
IN_FRAGMENTS = (
    ws_frame(frame_text("heartbeat").encode(), fin=False)
    + ws_frame(b"", opcode=0, fin=False) * FRAGMENTS
    + ws_frame(b"", opcode=0)
)
CHALLENGE = 1
"""What a stranger gets before any answer."""


async def answered_until_cut(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, flood: bytes) -> int:
    """Send ``flood`` until the relay closes, and return how many frames it has sent meanwhile."""
    writer.write(flood)
    answered = 0
    async with asyncio.timeout(BOUND_S):
        try:
            while True:
                await read_ws_frame(reader)
                answered += 1
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
    writer.transport.abort()
    return answered


@pytest.mark.parametrize(
    ("flood", "answers"),
    [
        # What the bucket gains while the burst is parsed comes on top.
        pytest.param(PING * 100_000, FRAMES_AT_ONCE + 5, id="pings"),
        pytest.param(ws_frame(b"", opcode=10) * 10_000, 0, id="pongs"),
        pytest.param(ws_frame(b"x" * 125, opcode=10) * 10_000, 0, id="full pongs"),
        # Of the messages; 120 fragments are less than two.
        pytest.param(IN_FRAGMENTS * 200, 3, id="fragments"),
        pytest.param(TINY * 20_000, 0, id="tiny messages"),
    ],
)
async def test_a_node_is_cut_off(
    relay: ServedRelay, node: SimulatedNode, monkeypatch: pytest.MonkeyPatch, flood: bytes, answers: int
) -> None:
    if flood.startswith((IN_FRAGMENTS, TINY)):
        monkeypatch.setattr("relay.http.websocket_protocol.MAX_BEHIND_S", BEHIND_S)
    reader, writer = await relay.admitted(node)
    assert await answered_until_cut(reader, writer, flood) <= answers
    await relay.until_idle()
    refusals = relay.refusals()
    assert ("session_broken", node.node_id, "flooded", 1) in refusals
    dropped = [
        count for event, _, reason, count in refusals if (event, reason) == ("frame_dropped", "malformed")
    ]
    assert len(refusals) == 1 + len(dropped)
    if flood.startswith(TINY):  # the rest has waited for its turn unparsed
        assert 0 < sum(dropped) <= FRAMES_AT_ONCE + 5


@pytest.mark.parametrize(
    "flood",
    [
        pytest.param(PING * 100, id="pings"),
        # Few enough bytes: it is the frames that are too many.
        pytest.param(ws_frame(b"", opcode=10) * 9, id="pongs"),
        pytest.param(IN_FRAGMENTS, id="fragments"),
    ],
)
async def test_a_stranger_is_cut_off_after_a_handful(relay: ServedRelay, flood: bytes) -> None:
    reader, writer = await relay.upgraded()
    assert await answered_until_cut(reader, writer, flood) <= CHALLENGE + FRAMES_BEFORE_ADMISSION
    await relay.until_idle()
    assert relay.refusals() == [("node_refused", HERE, "flooded", 1)]


async def test_a_stranger_is_closed_at_the_first_message(relay: ServedRelay) -> None:
    reader, writer = await relay.upgraded()
    await answered_until_cut(reader, writer, TINY * 20_000)
    await relay.until_idle()
    assert [(event, source, count) for event, source, _, count in relay.refusals()] == [
        ("node_refused", HERE, 1)
    ]
