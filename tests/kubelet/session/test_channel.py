import asyncio
import json
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial

import pytest
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.utils import accept_key

from kubelet.session.channel import SILENCE_S, Channel, MeteredConnection, open_channel
from kubelet.session.relay_addresses import RelayAddress
from relay.http.listener import WRITE_TIMEOUT_S
from schemas.frames import MAX_FRAME_BYTES, FrameBudgets, FrameReader, OneWayType, Role
from schemas.session import CloseCode, ProtocolError
from schemas.ulids import UlidSource
from tests.fakes.clock import FakeClock
from tests.fakes.frames import PAYLOADS
from tests.fakes.played_relay import PlayedRelay, RelayEnd
from tests.fakes.polling import before_asking_again

pytestmark = pytest.mark.integration

BOUND_S = 30


@pytest.fixture
async def fresh(
    relay: PlayedRelay, reader: FrameReader, clock: FakeClock
) -> AsyncIterator[tuple[Channel, RelayEnd]]:
    """Hold a connection on which nothing was said yet."""
    ulids, address = UlidSource(clock, os.urandom), RelayAddress(relay.url)
    async with open_channel(relay.url, address, None, reader, ulids, BOUND_S) as channel:
        yield channel, await relay.next()


@pytest.fixture
async def opened(fresh: tuple[Channel, RelayEnd]) -> tuple[Channel, RelayEnd]:
    channel, end = fresh
    await end.challenge()
    challenge = await channel.receive()
    assert challenge is not None
    await channel.send("auth", PAYLOADS["auth"], challenge.msg_id)
    auth = await end.receive()
    await end.send("welcome", answers=auth.msg_id)
    await channel.receive()
    return fresh


async def test_a_channel_is_open_from_the_welcome_on(fresh: tuple[Channel, RelayEnd]) -> None:
    channel, end = fresh
    assert not channel.is_open
    await end.challenge()
    challenge = await channel.receive()
    assert challenge is not None
    assert challenge.type == "challenge"
    assert not channel.is_open
    assert await channel.send("auth", PAYLOADS["auth"], challenge.msg_id) is True
    auth = await end.receive()
    assert (auth.type, auth.payload, auth.in_reply_to) == ("auth", PAYLOADS["auth"], challenge.msg_id)
    assert not channel.is_open
    await end.send("welcome", answers=auth.msg_id)
    welcome = await channel.receive()
    assert welcome is not None
    assert welcome.payload == PAYLOADS["welcome"]
    assert channel.is_open


async def test_frames_that_are_sent_together_are_one_write(
    opened: tuple[Channel, RelayEnd], monkeypatch: pytest.MonkeyPatch
) -> None:
    channel, end = opened
    transport, written = channel._socket.transport, []  # noqa: SLF001 - what is written shows nowhere else
    write = transport.write

    def watched(data: bytes) -> None:
        written.append(data)
        write(data)

    monkeypatch.setattr(transport, "write", watched)
    frames = [("announce", PAYLOADS["announce"]), ("heartbeat", PAYLOADS["heartbeat"])]
    assert await channel.send_together(frames) is True
    received = [await end.receive() for _ in frames]
    assert [(frame.type, frame.payload) for frame in received] == frames
    assert len({frame.msg_id for frame in received}) == 2
    assert len(written) == 1


@pytest.mark.parametrize(
    ("value", "why"),
    [
        (2**53, "an integer beyond"),
        ("\ud800", "a lone surrogate"),
        (json.loads("[" * 32 + "]" * 32), "nested too deeply"),
    ],
)
async def test_what_the_relay_would_end_the_session_for_is_not_sent(
    opened: tuple[Channel, RelayEnd], value: object, why: str
) -> None:
    channel, end = opened
    with pytest.raises(ProtocolError, match=why):
        await channel.send("cmd_ack", {"ok": True, "result": {"value": value}}, "01ARZ3NDEKTSV4RRFFQ69G5FAV")
    assert await channel.send("renew", PAYLOADS["renew"]) is True
    assert (await end.receive()).type == "renew"


async def test_of_frames_one_of_which_is_over_the_limit_none_is_sent(
    opened: tuple[Channel, RelayEnd],
) -> None:
    channel, end = opened
    with pytest.raises(ProtocolError, match="a frame over the limit"):
        await channel.send_together(
            [("heartbeat", PAYLOADS["heartbeat"]), ("announce", {"text": "x" * MAX_FRAME_BYTES})]
        )
    assert await channel.send("renew", PAYLOADS["renew"]) is True
    assert (await end.receive()).type == "renew"


async def test_an_end_that_speaks_out_of_turn_is_stopped_before_it_speaks(
    fresh: tuple[Channel, RelayEnd],
) -> None:
    channel, end = fresh
    with pytest.raises(ProtocolError, match="heartbeat does not belong in state challenging"):
        await channel.send("heartbeat", PAYLOADS["heartbeat"])
    await channel.close(CloseCode.NORMAL)
    assert await end.until_closed() == CloseCode.NORMAL


async def test_a_frame_over_the_limit_does_not_end_the_channel(opened: tuple[Channel, RelayEnd]) -> None:
    channel, end = opened
    with pytest.raises(ProtocolError, match="a frame over the limit"):
        await channel.send("announce", {"text": "x" * MAX_FRAME_BYTES})
    assert await channel.send("heartbeat", PAYLOADS["heartbeat"]) is True
    assert (await end.receive()).type == "heartbeat"


async def test_sending_into_a_lost_connection_is_told_and_not_raised(
    opened: tuple[Channel, RelayEnd],
) -> None:
    channel, end = opened
    end.drop()
    with pytest.raises(ConnectionClosed):
        await channel.receive()
    assert await channel.send("heartbeat", PAYLOADS["heartbeat"]) is False
    assert await channel.send_together([("heartbeat", PAYLOADS["heartbeat"])]) is False


async def test_nothing_is_sent_after_the_relay_has_said_goodbye(opened: tuple[Channel, RelayEnd]) -> None:
    channel, end = opened
    await end.send("bye")
    bye = await channel.receive()
    assert bye is not None
    assert bye.type == "bye"
    assert not channel.is_open
    assert await channel.send("heartbeat", PAYLOADS["heartbeat"]) is False
    await end.socket.close(CloseCode.GOING_AWAY)
    with pytest.raises(ConnectionClosed):
        await end.socket.recv()


async def test_answers_that_local_agents_requested_exceed_no_rate(opened: tuple[Channel, RelayEnd]) -> None:
    channel, end = opened
    requests, answers = 20, 500
    for _ in range(requests):
        await channel.send_text(channel.encoded("caller_tool", PAYLOADS["caller_tool"]))
    for _ in range(requests):
        await end.receive("caller_tool")
    for _ in range(answers):
        await end.send("caller_tool_result")
    async with asyncio.timeout(BOUND_S):
        for _ in range(answers):
            assert await channel.receive() is not None


TEXT = b"\x81\x02hi"
PING = b"\x89\x00"
CLOSE = b"\x88\x02\x03\xe8"

Answer = Callable[[bytes], list[bytes]]
"""From the key of the upgrade to what the server says, piece by piece."""


def accepted(after: bytes) -> Answer:
    def answer(key: bytes) -> list[bytes]:
        head = "HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        return [f"{head}Sec-WebSocket-Accept: {accept_key(key.decode())}\r\n\r\n".encode() + after]

    return answer


@asynccontextmanager
async def listening(answer: Answer) -> AsyncIterator[int]:
    """Serve one connection after the other with ``answer``, and yield the port."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        key = head.partition(b"Sec-WebSocket-Key: ")[2].partition(b"\r\n")[0]
        for piece in answer(key):
            writer.write(piece)
            await writer.drain()
        await reader.read(1)  # what it says is a close, or a pong
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        yield server.sockets[0].getsockname()[1]


@asynccontextmanager
async def metered(
    port: int, commands_per_s: float = 0.0, silence_s: float = SILENCE_S
) -> AsyncIterator[ClientConnection]:
    make = partial(MeteredConnection, commands_per_s=commands_per_s, silence_s=silence_s)
    url = f"ws://127.0.0.1:{port}"
    options = {
        "compression": None,
        "proxy": None,
        "close_timeout": 0.1,
        "ping_interval": None,
        "max_size": MAX_FRAME_BYTES,
    }
    async with connect(url, create_connection=make, **options) as socket:  # type: ignore[arg-type]  # as in channel
        yield socket


async def messages(socket: ClientConnection) -> int:
    """Return how many messages come until the connection ends."""
    count = 0
    try:
        while True:
            assert await socket.recv() == "hi"
            count += 1
    except ConnectionClosed:
        return count


@pytest.mark.parametrize("size", [1, 3, 1000])
async def test_frames_right_behind_the_upgrade_are_taken_however_they_come(size: int) -> None:
    def in_pieces(key: bytes) -> list[bytes]:
        said = accepted(TEXT + PING + TEXT)(key)[0]
        return [said[start : start + size] for start in range(0, len(said), size)]

    async with listening(in_pieces) as port, metered(port) as socket:
        assert [await socket.recv(), await socket.recv()] == ["hi", "hi"]


@pytest.mark.parametrize(
    ("frames", "read", "code"),
    [
        pytest.param(
            b"\x01\x01h" + b"\x80\x01i" + TEXT + CLOSE, 2, 1000, id="a text in fragments, and a whole one"
        ),
        pytest.param(TEXT + b"\x01\x01h" + TEXT, 1, 1002, id="a whole text within a fragmented one"),
        pytest.param(b"\x81\x82\0\0\0\0hi", 0, 1002, id="masked as a client has to"),
        pytest.param(b"\xc1\x02hi", 0, 1002, id="by an extension that was not agreed upon"),
        pytest.param(b"\x81\x7f" + (MAX_FRAME_BYTES + 1).to_bytes(8), 0, 1009, id="too large"),
        pytest.param(TEXT + CLOSE + TEXT, 1, 1000, id="behind a close"),
    ],
)
async def test_what_is_no_whole_text_is_judged_by_the_library(frames: bytes, read: int, code: int) -> None:
    async with listening(accepted(frames)) as port, metered(port) as socket:
        assert await messages(socket) == read
        assert socket.protocol.close_sent is not None
        assert socket.protocol.close_sent.code == code


@pytest.mark.parametrize(
    ("commands_per_s", "at_once", "frames_per_s"),
    [pytest.param(0.0, 2366, 250, id="none"), pytest.param(15.0, 2456, 340, id="fifteen")],
)
async def test_what_exceeds_the_rate_ends_the_connection(
    commands_per_s: float, at_once: int, frames_per_s: int
) -> None:
    now = asyncio.get_running_loop().time
    began = now()
    async with listening(accepted(TEXT * 5000)) as port, metered(port, commands_per_s) as socket:
        count = await messages(socket)
        # A message costs a little more than a frame without a payload.
        assert at_once - 1 <= count <= at_once + frames_per_s * (now() - began)
        assert isinstance(socket, MeteredConnection)
        assert socket.is_flooded


async def test_what_a_relay_sends_by_its_rates_exceeds_none_also_behind_a_stall() -> None:
    """One that is not read for longer than ``WRITE_TIMEOUT_S`` closes."""
    seconds = [0.0]
    rates = FrameBudgets(Role.RELAY, lambda: seconds[0])
    types = [type_ for type_ in OneWayType if type_.sender is Role.RELAY]
    types.remove(OneWayType.CALLER_TOOL_RESULT)  # which the node has requested
    count = 0
    while seconds[0] < WRITE_TIMEOUT_S:
        for type_ in types:
            while rates.take(type_) == 0:
                count += 1
        seconds[0] += 0.1
    async with listening(accepted(TEXT * count)) as port, metered(port) as socket:
        for _ in range(count):
            assert await socket.recv() == "hi"


async def test_a_refusal_is_read_to_its_end() -> None:
    def refused(_key: bytes) -> list[bytes]:
        return [b"HTTP/1.1 403 Forbidden\r\nContent-Length: 3\r\n\r", b"\nnox"]

    async with listening(refused) as port:
        with pytest.raises(InvalidStatus):
            async with metered(port):
                raise AssertionError("it was refused")


async def test_a_relay_that_says_nothing_any_more_is_given_up() -> None:
    async with listening(accepted(TEXT)) as port, metered(port, silence_s=0.1) as socket:
        async with asyncio.timeout(BOUND_S):
            assert await messages(socket) == 1
        assert isinstance(socket, MeteredConnection)
        assert not socket.is_flooded


async def test_a_relay_that_pings_and_does_not_read_is_given_up() -> None:
    ended = asyncio.Event()

    async def ping(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        writer.write(accepted(b"")(head.partition(b"Sec-WebSocket-Key: ")[2].partition(b"\r\n")[0])[0])
        with suppress(OSError):
            while not writer.is_closing():
                writer.write(PING)
                await writer.drain()
                await before_asking_again()
        writer.transport.abort()
        ended.set()

    async with (
        await asyncio.start_server(ping, "127.0.0.1", 0) as server,
        metered(server.sockets[0].getsockname()[1], silence_s=0.5) as socket,
        asyncio.timeout(BOUND_S),
    ):
        with suppress(ConnectionClosed):
            while True:
                await socket.send("x" * 1_000_000)
        await ended.wait()


async def test_a_relay_that_only_pings_is_heard() -> None:
    pinging, ponged = asyncio.Event(), asyncio.Event()

    async def ping_later(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        writer.write(accepted(b"")(head.partition(b"Sec-WebSocket-Key: ")[2].partition(b"\r\n")[0])[0])
        await pinging.wait()
        writer.write(PING)
        await reader.readexactly(6)
        ponged.set()
        await reader.read()
        writer.close()

    async with (
        await asyncio.start_server(ping_later, "127.0.0.1", 0) as server,
        metered(server.sockets[0].getsockname()[1]) as socket,
        asyncio.timeout(BOUND_S),
    ):
        assert isinstance(socket, MeteredConnection)
        before = socket.heard_at
        pinging.set()
        await ponged.wait()
        assert socket.heard_at > before
