"""Attacker: a node before it is admitted, and one that is. Tried: frames that are no JSON of one reading.

What must happen: the session ends with 4009 and nothing else ends with it; the frame is refused with the
reason of ``strict_json``; a stranger's is a ``node_refused`` line in the audit.
"""

import pytest

from schemas.frames import (
    FRAME_TYPES,
    MAX_FRAME_BYTES,
    MAX_FRAME_BYTES_BEFORE_WELCOME,
    FrameError,
    FrameReader,
    Role,
)
from schemas.session import CloseCode, ProtocolError, SessionMachine, SessionState
from tests.fakes.documents import HOSTILE, NO_OBJECTS, Spoil
from tests.fakes.frames import PAYLOADS, frame_text
from tests.fakes.refusals import audited_refusals, manifest_in_force, refusal
from tests.fakes.seconds import Seconds
from tests.fakes.served_relay import ServedRelay
from tests.fakes.signer import OTHER_NODE_ID, SimulatedNode

SPOILT = [pytest.param(spoil, reason, id=name) for name, (spoil, reason) in HOSTILE.items()]
# What a WebSocket carries in a text frame; the rest ends with the connection, below the session.
AS_TEXT = {
    name: (spoil, reason)
    for name, (spoil, reason) in HOSTILE.items()
    if spoil(b'{"a":1}').isascii() and len(spoil(b'{"a":1}')) < MAX_FRAME_BYTES_BEFORE_WELCOME - 1024
}


@pytest.mark.parametrize(("spoil", "reason"), SPOILT)
@pytest.mark.parametrize("type_", FRAME_TYPES)
def test_a_document_with_two_readings_is_no_frame(
    reader: FrameReader, type_: str, spoil: Spoil, reason: str
) -> None:
    with pytest.raises(FrameError) as caught:
        reader.read(spoil(frame_text(type_).encode()), MAX_FRAME_BYTES)
    assert caught.value.reason == reason
    assert caught.value.type is None


@pytest.mark.parametrize("data", NO_OBJECTS)
def test_nor_is_one_that_is_no_object(reader: FrameReader, data: bytes) -> None:
    with pytest.raises(FrameError, match="an unknown frame type"):
        reader.read(data, MAX_FRAME_BYTES)


@pytest.mark.parametrize(
    "type_", ['"hello"', "null", "[]", "{}", "1", "true", '["auth"]', '"auth "', '"AUTH"']
)
def test_nor_is_one_whose_type_is_none(reader: FrameReader, type_: str) -> None:
    with pytest.raises(FrameError, match="an unknown frame type"):
        reader.read(f'{{"type":{type_}}}', MAX_FRAME_BYTES)


@pytest.mark.parametrize("role", Role)
@pytest.mark.parametrize("state", SessionState)
@pytest.mark.parametrize(("spoil", "reason"), SPOILT)
def test_either_end_ends_the_session_over_it_in_every_state(
    reader: FrameReader, role: Role, state: SessionState, spoil: Spoil, reason: str
) -> None:
    session = SessionMachine(role, reader, Seconds())
    session.state = state
    for type_ in FRAME_TYPES:
        with pytest.raises(ProtocolError) as caught:
            session.receive(spoil(frame_text(type_).encode()))
        # Before the welcome 8 KiB are too much already.
        assert caught.value.reason in {reason, "larger than the limit"}
        assert caught.value.code == CloseCode.PROTOCOL_VIOLATION
    assert session.state is state


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("spoil", [spoil for spoil, _ in AS_TEXT.values()], ids=list(AS_TEXT))
async def test_an_unauthenticated_node_that_sends_it_is_disconnected(
    relay: ServedRelay, node: SimulatedNode, spoil: Spoil
) -> None:
    bystander = relay.hub.ca.issue(OTHER_NODE_ID)
    async with relay.session(bystander) as other, relay.end(node) as end:
        await end.receive("challenge")
        await end.send_raw(spoil(frame_text("auth").encode()).decode("ascii"))
        assert await end.until_closed() == (4009, [])
        await other.send("heartbeat", PAYLOADS["heartbeat"])
        await other.receive("heartbeat_ack")
    assert audited_refusals(relay.hub) == [refusal("node_refused", "127.0.0.1", "protocol")]


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(("spoil", "reason"), AS_TEXT.values(), ids=list(AS_TEXT))
async def test_an_admitted_node_that_sends_it_loses_its_session(
    relay: ServedRelay, node: SimulatedNode, spoil: Spoil, reason: str
) -> None:
    bystander = relay.hub.ca.issue(OTHER_NODE_ID)
    async with relay.session(bystander) as other, relay.session(node) as end:
        await end.send_raw(spoil(frame_text("heartbeat").encode()).decode("ascii"))
        code, _frames = await end.until_closed()
        assert code == 4009
        await other.send("heartbeat", PAYLOADS["heartbeat"])
        await other.receive("heartbeat_ack")
    (line,) = relay.hub.lines.entries("node broke the protocol")
    assert (line["node_id"], line["reason"]) == (node.node_id, reason)
    # Its manifest was good, and is so still: what it may list is a matter of the connection alone.
    assert manifest_in_force(relay.hub, node) is not None


@pytest.mark.asyncio(loop_scope="module")
async def test_an_answer_that_does_not_fit_its_document_is_dropped_and_said(
    relay: ServedRelay, node: SimulatedNode
) -> None:
    async with relay.session(node) as end:
        for number in range(3):
            await end.send_raw(frame_text("cmd_ack", number, ok="yes"))
        for number in range(2):
            await end.send_raw(frame_text("cmd_ack", number, answers=number))
        await end.send("heartbeat", PAYLOADS["heartbeat"])
        await end.receive("heartbeat_ack")
    assert audited_refusals(relay.hub) == [
        refusal("frame_dropped", node.node_id, "malformed", 3),
        refusal("frame_dropped", node.node_id, "unasked", 2),
    ]
