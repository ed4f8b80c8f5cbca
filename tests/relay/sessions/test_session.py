"""A node's session, one connection of it, and what each frame does there."""

import asyncio
import json
from typing import Any, cast

import pytest

from relay.http.websocket_protocol import SocketClosedError
from relay.routing.port import Command, CommandAnswer
from relay.sessions.frame_handlers import heartbeat_interval_ms
from relay.sessions.node_sessions import cmd_payload
from relay.sessions.session import NodeConnection, NodeSession, SessionClock
from schemas.errors import Failure, ToolError
from schemas.frames import Frame, FrameReader, Role
from schemas.payloads import CmdAck, Welcome
from schemas.registry import SchemaRegistry
from schemas.session import CloseCode, PeerProtocolError, ProtocolError, SessionMachine
from schemas.ulids import UlidSource
from tests.fakes.clock import FakeClock
from tests.fakes.frames import COMMAND, PAYLOADS, frame_text, message_id
from tests.fakes.scripted_socket import ScriptedSocket
from tests.fakes.seconds import Seconds
from tests.fakes.signer import NODE_ID, NOW_MS, SimulatedCa

ULIDS = UlidSource(FakeClock(NOW_MS), bytes)


async def opened(socket: ScriptedSocket, reader: FrameReader) -> NodeConnection:
    """Return a link whose handshake is done, and forget what was said in it."""
    link = NodeConnection(socket, SessionMachine(Role.RELAY, reader, Seconds()), ULIDS)
    await link.send_text(link.encoded("challenge", PAYLOADS["challenge"], message_id(1)))
    socket.put(frame_text("auth", 2, answers=1))
    await link.receive()
    await link.welcome(cast("Welcome", PAYLOADS["welcome"]), message_id(2))
    socket.sent.clear()
    return link


def texts(socket: ScriptedSocket) -> list[dict[str, Any]]:
    return [json.loads(text) for text in socket.sent]


async def test_a_link_is_open_from_the_welcome_to_the_end(reader: FrameReader) -> None:
    socket = ScriptedSocket()
    fresh = NodeConnection(socket, SessionMachine(Role.RELAY, reader, Seconds()), ULIDS)
    opened_link = await opened(ScriptedSocket(), reader)
    states = [fresh.is_open, opened_link.is_open]
    await opened_link.close(CloseCode.NORMAL)
    states.append(opened_link.is_open)
    assert states == [False, True, False]


async def test_what_is_sent_has_a_new_id_which_the_sender_learns(reader: FrameReader) -> None:
    socket = ScriptedSocket()
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
    socket = ScriptedSocket()
    link = await opened(socket, reader)
    socket.put(frame_text("heartbeat", 7))
    frame = await link.receive()
    assert frame is not None
    assert (frame.type, frame.msg_id, frame.payload) == ("heartbeat", message_id(7), PAYLOADS["heartbeat"])


async def test_dropped_answers_are_counted_until_the_count_is_taken(reader: FrameReader) -> None:
    socket = ScriptedSocket()
    link = await opened(socket, reader)
    await link.send_text(link.encoded("cmd", PAYLOADS["cmd"], message_id(5)))
    link.forget(message_id(5))
    for _ in range(2):
        socket.put(frame_text("cmd_ack", 6, answers=5))
        assert await link.receive() is None
    assert link.take_dropped() == {"unasked": 2}
    assert link.take_dropped() == {}


async def test_a_binary_frame_breaks_the_protocol(reader: FrameReader) -> None:
    socket = ScriptedSocket()
    link = await opened(socket, reader)
    socket.put(frame_text("heartbeat").encode())
    with pytest.raises(ProtocolError) as caught:
        await link.receive()
    assert caught.value.code is CloseCode.PROTOCOL_VIOLATION


async def test_a_connection_that_ends_is_told_with_its_code(reader: FrameReader) -> None:
    socket = ScriptedSocket()
    link = await opened(socket, reader)
    socket.put(1006)
    with pytest.raises(SocketClosedError) as caught:
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
    socket = ScriptedSocket()
    link = await opened(socket, reader)
    await link.close(code)
    assert not link.is_open
    assert [text["payload"]["reason"] for text in texts(socket)] == goodbyes
    assert socket.closes == [code]


async def test_before_the_handshake_a_node_can_be_told_to_come_again(reader: FrameReader) -> None:
    socket = ScriptedSocket()
    link = NodeConnection(socket, SessionMachine(Role.RELAY, reader, Seconds()), ULIDS)
    await link.close(CloseCode.OVER_CAPACITY, retry_after_ms=1500)
    assert [text["payload"] for text in texts(socket)] == [
        {"reason": "over_capacity", "retry_after_ms": 1500}
    ]
    assert socket.closes == [CloseCode.OVER_CAPACITY]


async def test_closing_twice_or_what_is_already_gone_is_nothing(reader: FrameReader) -> None:
    socket = ScriptedSocket()
    link = await opened(socket, reader)
    await link.close(CloseCode.SUPERSEDED)
    await link.close(CloseCode.SUPERSEDED)
    assert len(socket.closes) == 1
    broken = ScriptedSocket()
    link = await opened(broken, reader)
    broken.breaks_at = 0
    await link.close(CloseCode.SUPERSEDED)
    assert not link.is_open


async def test_nothing_is_sent_after_the_end(reader: FrameReader) -> None:
    socket = ScriptedSocket()
    link = await opened(socket, reader)
    await link.close(CloseCode.PROTOCOL_VIOLATION)
    with pytest.raises(ProtocolError):
        await link.send("cmd", PAYLOADS["cmd"])
    assert texts(socket) == []


def handles_answers(connection: NodeConnection) -> list[str]:
    """Have answers to commands handled as they arrive; return the types of those that were."""
    handled: list[str] = []

    def handle(_connection: NodeConnection, frame: Frame) -> bool:
        if frame.type == "cmd_ack":
            handled.append(frame.type)
        return frame.type == "cmd_ack"

    connection.handle_frames(handle)
    return handled


async def test_a_frame_is_handled_as_it_arrives_or_received_once(reader: FrameReader) -> None:
    socket = ScriptedSocket()
    connection = await opened(socket, reader)
    handled = handles_answers(connection)
    await connection.send_text(connection.encoded("cmd", PAYLOADS["cmd"], message_id(5)))
    socket.put(frame_text("cmd_ack", 6, answers=5))
    socket.put(frame_text("heartbeat", 7))
    frame = await connection.receive()
    assert handled == ["cmd_ack"]
    assert frame is not None
    assert (frame.type, frame.msg_id) == ("heartbeat", message_id(7))
    assert connection.take_dropped() == {}


async def test_a_dropped_frame_is_received_as_nothing(reader: FrameReader) -> None:
    socket = ScriptedSocket()
    connection = await opened(socket, reader)
    handled = handles_answers(connection)
    socket.put(frame_text("cmd_ack", 6, answers=5))
    assert await connection.receive() is None
    assert connection.take_dropped() == {"unasked": 1}
    assert handled == []


async def test_what_breaks_the_protocol_is_raised_when_it_is_received(reader: FrameReader) -> None:
    socket = ScriptedSocket()
    connection = await opened(socket, reader)
    socket.put("{}")
    with pytest.raises(PeerProtocolError):
        await connection.receive()


DONE: CmdAck = {"ok": True, "result": {}}
AGAIN: CmdAck = {"ok": True, "result": {"again": 1}}
REVOKED = ToolError(Failure.ATTESTATION_FAILED)


@pytest.fixture
def live() -> NodeSession:
    return NodeSession(
        "session-1", "boot-1", SimulatedCa().issue().identity(), None, SessionClock(NOW_MS, lambda: 0)
    )


def sent(live: NodeSession, msg_id: str) -> CommandAnswer:
    """Return what waits for the answer to a command that was sent as ``msg_id``."""
    waiter = CommandAnswer(asyncio.get_running_loop())
    live.pending.add(msg_id, COMMAND, NOW_MS + 1000, waiter)
    return waiter


async def test_an_answer_goes_to_who_asked_for_it_once(live: NodeSession) -> None:
    first, second = sent(live, "1"), sent(live, "2")
    live.settle("1", DONE)
    live.settle("1", AGAIN)
    assert first.result() is DONE
    assert not second.done()
    assert len(live.pending) == 1


async def test_all_that_is_not_answered_ends_with_the_same_error(live: NodeSession) -> None:
    answered, given_up, *waiting = (sent(live, str(number)) for number in range(5))
    live.settle("0", DONE)
    given_up.cancel()
    live.fail_all(REVOKED)
    assert answered.result() is DONE
    assert given_up.cancelled()
    assert [waiter.exception() for waiter in waiting] == [REVOKED] * 3
    assert len(live.pending) == 0


@pytest.mark.parametrize("traceparent", [None, f"00-{'a' * 32}-{'b' * 16}-01"])
def test_a_cmd_fits_its_document_with_a_trace_and_without(
    registry: SchemaRegistry, traceparent: str | None
) -> None:
    command = Command(
        NODE_ID, f"sysecho.{NODE_ID}.echo.invoke", {}, 1000, "01HZX9K3M4P7Q8R9S0T1V2W3XY", traceparent
    )
    payload = cmd_payload(command, NOW_MS)
    assert payload.get("traceparent") == traceparent
    assert (payload["sent_at_ms"], payload["deadline_ms"]) == (NOW_MS, 1000)
    frame = {"type": "cmd", "msg_id": "01HZX9K3M4P7Q8R9S0T1V2W3XZ", "payload": payload}
    assert registry.load("session.cmd@1.0.0").is_valid(frame)


@pytest.mark.parametrize(
    ("nodes", "seconds"),
    [(0, 60), (1, 60), (10_000, 60), (55_000, 180), (100_000, 300), (10_000_000, 300)],
)
def test_the_interval_grows_with_the_fleet(nodes: int, seconds: int) -> None:
    assert heartbeat_interval_ms(nodes) == seconds * 1000


def test_it_never_shrinks_as_the_fleet_grows_and_is_whole_seconds() -> None:
    intervals = [heartbeat_interval_ms(nodes) for nodes in range(0, 120_000, 997)]
    assert intervals == sorted(intervals)
    assert not any(interval % 1000 for interval in intervals)


@pytest.mark.parametrize("by_ms", [10_000, -10_000, 3_600_000, -3_600_000])
def test_a_session_counts_from_its_beginning_whatever_is_set(by_ms: int) -> None:
    system = FakeClock(NOW_MS)
    clock = SessionClock(system(), system.ticks_ms)
    assert clock() == NOW_MS
    system.step(by_ms)
    assert clock() == NOW_MS
    system.advance(1234)
    assert clock() == NOW_MS + 1234
