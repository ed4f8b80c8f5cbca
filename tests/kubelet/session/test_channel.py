import asyncio
import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed

from kubelet.session.channel import Channel
from kubelet.session.channel import opened as connection
from kubelet.session.relay_addresses import RelayAddress
from schemas.addresses import connect_url
from schemas.frames import MAX_FRAME_BYTES, SUBPROTOCOL, FrameReader, Role
from schemas.session import CloseCode, ProtocolError, SessionMachine
from schemas.ulids import UlidSource
from tests.fakes.clock import FakeClock
from tests.fakes.frames import PAYLOADS, frame_text
from tests.fakes.played_relay import PlayedRelay, RelayEnd

pytestmark = pytest.mark.integration

BOUND_S = 10


@pytest.fixture
async def relay(reader: FrameReader) -> AsyncIterator[PlayedRelay]:
    async with PlayedRelay(reader).running() as relay:
        yield relay


@asynccontextmanager
async def connected(
    relay: PlayedRelay, reader: FrameReader, clock: FakeClock
) -> AsyncIterator[tuple[Channel, RelayEnd]]:
    """Hold a connection on which nothing was said yet."""
    protocols = [SUBPROTOCOL]
    async with connect(
        connect_url(relay.url),
        subprotocols=protocols,  # type: ignore[arg-type]  # a NewType over str
        compression=None,
        max_size=MAX_FRAME_BYTES,
        proxy=None,
        close_timeout=1,
    ) as socket:
        channel = Channel(
            socket, SessionMachine(Role.NODE, reader, time.monotonic), UlidSource(clock, os.urandom)
        )
        yield channel, await relay.next()


@pytest.fixture
async def fresh(
    relay: PlayedRelay, reader: FrameReader, clock: FakeClock
) -> AsyncIterator[tuple[Channel, RelayEnd]]:
    async with connected(relay, reader, clock) as pair:
        yield pair


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
    return channel, end


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


async def test_every_frame_has_an_id_of_its_own(opened: tuple[Channel, RelayEnd]) -> None:
    channel, end = opened
    for _ in range(3):
        assert await channel.send("heartbeat", PAYLOADS["heartbeat"]) is True
    assert len({(await end.receive()).msg_id for _ in range(3)}) == 3


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


async def test_nothing_is_sent_after_our_own_goodbye(opened: tuple[Channel, RelayEnd]) -> None:
    channel, end = opened
    assert await channel.send("bye", PAYLOADS["bye"]) is True
    assert not channel.is_open
    assert await channel.send("heartbeat", PAYLOADS["heartbeat"]) is False
    assert (await end.receive()).type == "bye"


async def test_an_answer_to_nothing_is_dropped(opened: tuple[Channel, RelayEnd]) -> None:
    channel, end = opened
    await end.socket.send(frame_text("heartbeat_ack", 1, answers=99))
    await end.send("cmd")
    assert await channel.receive() is None
    frame = await channel.receive()
    assert frame is not None
    assert frame.type == "cmd"


@pytest.mark.parametrize(
    "data",
    [
        pytest.param("", id="nothing"),
        pytest.param("{", id="not JSON"),
        pytest.param(b"\xff", id="not text"),
        pytest.param('{"type":"shell"}', id="an unknown type"),
        pytest.param('{"type":"bye","type":"bye"}', id="a key twice"),
        pytest.param(frame_text("challenge"), id="a frame of another state"),
        pytest.param(frame_text("heartbeat"), id="a frame of the node's own"),
    ],
)
async def test_a_relay_that_breaks_the_protocol_is_found_out(
    opened: tuple[Channel, RelayEnd], data: str | bytes
) -> None:
    channel, end = opened
    await end.socket.send(data)
    with pytest.raises(ProtocolError):
        await channel.receive()


async def test_the_end_of_the_connection_comes_with_its_code(opened: tuple[Channel, RelayEnd]) -> None:
    channel, end = opened
    await end.socket.close(CloseCode.REVOKED)
    with pytest.raises(ConnectionClosed) as closed:
        await channel.receive()
    assert closed.value.rcvd is not None
    assert closed.value.rcvd.code == CloseCode.REVOKED


async def test_answers_that_local_agents_requested_exceed_no_rate(
    relay: PlayedRelay, reader: FrameReader, clock: FakeClock
) -> None:
    requests, answers = 20, 500
    ulids, address = UlidSource(clock, os.urandom), RelayAddress(relay.url)
    async with connection(relay.url, address, None, reader, ulids, BOUND_S) as channel:
        end = await relay.next()
        await end.challenge()
        challenge = await channel.receive()
        assert challenge is not None
        await channel.send("auth", PAYLOADS["auth"], challenge.msg_id)
        await end.send("welcome", answers=(await end.receive()).msg_id)
        await channel.receive()
        for _ in range(requests):
            await channel.send_text(channel.encoded("caller_tool", PAYLOADS["caller_tool"]))
        for _ in range(requests):
            await end.receive("caller_tool")
        for _ in range(answers):
            await end.send("caller_tool_result")
        async with asyncio.timeout(BOUND_S):
            for _ in range(answers):
                frame = await channel.receive()
                assert frame is not None
