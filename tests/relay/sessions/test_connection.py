import json
from typing import Any

import pytest
from starlette.websockets import WebSocketDisconnect

from relay.sessions.connection import NodeConnection
from schemas.frame_types import Role
from schemas.frames import FrameReader
from schemas.session import CloseCode, ProtocolError, SessionMachine
from schemas.ulids import UlidSource
from tests.fakes.asgi_socket import AsgiSocket
from tests.fakes.clock import FakeClock
from tests.fakes.frames import PAYLOADS, frame_text, message_id
from tests.fakes.seconds import Seconds
from tests.fakes.signer import NOW_MS

ULIDS = UlidSource(FakeClock(NOW_MS), bytes)


async def opened(socket: AsgiSocket, reader: FrameReader) -> NodeConnection:
    """Return a link whose handshake is done, and forget what was said in it."""
    link = NodeConnection(socket.websocket, SessionMachine(Role.RELAY, reader, Seconds()), ULIDS)
    await socket.websocket.accept()
    await link.send_as(message_id(1), "challenge", PAYLOADS["challenge"])
    socket.put_text(frame_text("auth", 2, answers=1))
    await link.receive()
    await link.send_as(message_id(3), "welcome", PAYLOADS["welcome"], message_id(2))
    socket.sent.clear()
    return link


def texts(socket: AsgiSocket) -> list[dict[str, Any]]:
    return [json.loads(message["text"]) for message in socket.sent if "text" in message]


async def test_a_link_is_open_from_the_welcome_to_the_end(reader: FrameReader) -> None:
    socket = AsgiSocket()
    fresh = NodeConnection(socket.websocket, SessionMachine(Role.RELAY, reader, Seconds()), ULIDS)
    opened_link = await opened(AsgiSocket(), reader)
    states = [fresh.is_open, opened_link.is_open]
    await opened_link.close(CloseCode.NORMAL)
    states.append(opened_link.is_open)
    assert states == [False, True, False]


async def test_what_is_sent_has_a_new_id_which_the_sender_learns(reader: FrameReader) -> None:
    socket = AsgiSocket()
    link = await opened(socket, reader)
    msg_id = await link.send("heartbeat_ack", {"server_time_ms": NOW_MS}, message_id(9))
    assert texts(socket) == [
        {
            "type": "heartbeat_ack",
            "msg_id": msg_id,
            "in_reply_to": message_id(9),
            "payload": {"server_time_ms": NOW_MS},
        }
    ]


async def test_a_frame_comes_in_as_what_it_is(reader: FrameReader) -> None:
    socket = AsgiSocket()
    link = await opened(socket, reader)
    socket.put_text(frame_text("heartbeat", 7))
    frame = await link.receive()
    assert frame is not None
    assert (frame.type, frame.msg_id, frame.payload) == ("heartbeat", message_id(7), PAYLOADS["heartbeat"])


async def test_dropped_answers_are_counted_until_somebody_asks(reader: FrameReader) -> None:
    socket = AsgiSocket()
    link = await opened(socket, reader)
    await link.send_as(message_id(5), "cmd", PAYLOADS["cmd"])
    link.forget(message_id(5))
    for _ in range(2):
        socket.put_text(frame_text("cmd_ack", 6, answers=5))
        assert await link.receive() is None
    assert link.take_dropped() == {"unasked": 2}
    assert link.take_dropped() == {}


async def test_a_binary_frame_breaks_the_protocol(reader: FrameReader) -> None:
    socket = AsgiSocket()
    link = await opened(socket, reader)
    socket.put({"type": "websocket.receive", "bytes": frame_text("heartbeat").encode()})
    with pytest.raises(ProtocolError) as caught:
        await link.receive()
    assert caught.value.code is CloseCode.PROTOCOL_VIOLATION


async def test_a_connection_that_ends_is_told_with_its_code(reader: FrameReader) -> None:
    socket = AsgiSocket()
    link = await opened(socket, reader)
    socket.put({"type": "websocket.disconnect", "code": 1006})
    with pytest.raises(WebSocketDisconnect) as caught:
        await link.receive()
    assert caught.value.code == 1006


@pytest.mark.parametrize(
    ("code", "goodbyes"),
    [
        pytest.param(CloseCode.SUPERSEDED, ["superseded"], id="superseded"),
        pytest.param(CloseCode.MANIFEST_REJECTED, ["manifest_rejected"], id="manifest rejected"),
        pytest.param(CloseCode.PROTOCOL_VIOLATION, [], id="no word for it"),
    ],
)
async def test_closing_says_goodbye_where_there_is_a_word_for_it(
    reader: FrameReader, code: CloseCode, goodbyes: list[str]
) -> None:
    socket = AsgiSocket()
    link = await opened(socket, reader)
    await link.close(code)
    assert not link.is_open
    assert [text["payload"]["reason"] for text in texts(socket)] == goodbyes
    assert (socket.sent[-1]["type"], socket.sent[-1]["code"]) == ("websocket.close", code)


async def test_before_the_handshake_a_node_can_be_told_to_come_again(reader: FrameReader) -> None:
    socket = AsgiSocket()
    link = NodeConnection(socket.websocket, SessionMachine(Role.RELAY, reader, Seconds()), ULIDS)
    await socket.websocket.accept()
    await link.close(CloseCode.OVER_CAPACITY, retry_after_ms=1500)
    assert [text["payload"] for text in texts(socket)] == [
        {"reason": "over_capacity", "retry_after_ms": 1500}
    ]
    assert socket.sent[-1]["code"] == CloseCode.OVER_CAPACITY


async def test_closing_twice_or_what_is_already_gone_is_nothing(reader: FrameReader) -> None:
    socket = AsgiSocket()
    link = await opened(socket, reader)
    await link.close(CloseCode.SUPERSEDED)
    await link.close(CloseCode.SUPERSEDED)
    assert len([message for message in socket.sent if message["type"] == "websocket.close"]) == 1
    broken = AsgiSocket()
    link = await opened(broken, reader)
    broken.breaks_at = 0
    await link.close(CloseCode.SUPERSEDED)
    assert not link.is_open


async def test_nothing_is_sent_after_the_end(reader: FrameReader) -> None:
    socket = AsgiSocket()
    link = await opened(socket, reader)
    await link.close(CloseCode.PROTOCOL_VIOLATION)
    with pytest.raises(ProtocolError):
        await link.send("cmd", PAYLOADS["cmd"])
    assert texts(socket) == []
