"""Attacker: an enrolled node, or a stranger. Tried: frames in many fragments, each message good as a whole,
so that a count of messages stays small; and fragments that hold nothing.

What must happen: each fragment counts. A node that stays above its rate for as long as its pongs may take
is cut off, a stranger after a handful, and the audit says why.
"""

import pytest

from tests.fakes.flood import answered_until_cut
from tests.fakes.frames import frame_text
from tests.fakes.raw_websocket import ws_frame
from tests.fakes.served_relay import HERE, ServedRelay
from tests.fakes.signer import SimulatedNode

pytestmark = pytest.mark.asyncio(loop_scope="module")

BEHIND_S = 0.1
FRAGMENTS, MESSAGES = 60, 200
_CONTINUATION = 0


def in_fragments(text: str) -> bytes:
    """Return one message in as many fragments as a message may have."""
    empty = ws_frame(b"", opcode=_CONTINUATION, fin=False)
    return ws_frame(text.encode(), fin=False) + empty * FRAGMENTS + ws_frame(b"", opcode=_CONTINUATION)


async def test_a_node_is_cut_off(
    relay: ServedRelay, node: SimulatedNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("relay.http.websocket_protocol.MAX_BEHIND_S", BEHIND_S)
    reader, writer = await relay.admitted(node)
    answered = await answered_until_cut(reader, writer, in_fragments(frame_text("heartbeat")) * MESSAGES)
    assert answered <= 3  # of the messages; 120 fragments are less than two
    await relay.until_idle()
    assert relay.refusals() == [("session_broken", node.node_id, "flooded", 1)]


async def test_a_stranger_is_cut_off(relay: ServedRelay) -> None:
    reader, writer = await relay.upgraded()
    await answered_until_cut(reader, writer, in_fragments(frame_text("heartbeat")))
    await relay.until_idle()
    assert relay.refusals() == [("node_refused", HERE, "flooded", 1)]
