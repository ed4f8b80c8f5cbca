"""A node's connection against servers that say whatever the test wants, byte by byte."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial

import pytest
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.utils import accept_key

from kubelet.session.channel import SILENCE_S, MeteredConnection

pytestmark = pytest.mark.integration

TEXT = b"\x81\x02hi"
PING = b"\x89\x00"
BOUND_S = 10

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
        await reader.read()
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        yield server.sockets[0].getsockname()[1]


@asynccontextmanager
async def connected(
    port: int, commands_per_s: float = 0.0, silence_s: float = SILENCE_S
) -> AsyncIterator[ClientConnection]:
    metered = partial(MeteredConnection, commands_per_s=commands_per_s, silence_s=silence_s)
    url = f"ws://127.0.0.1:{port}"
    options = {"compression": None, "proxy": None, "close_timeout": 0.1, "ping_interval": None}
    async with connect(url, create_connection=metered, **options) as socket:  # type: ignore[arg-type]  # as in channel
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

    async with listening(in_pieces) as port, connected(port) as socket:
        assert [await socket.recv(), await socket.recv()] == ["hi", "hi"]


@pytest.mark.parametrize(
    ("commands_per_s", "at_once", "frames_per_s"),
    [pytest.param(0.0, 440, 100, id="none"), pytest.param(15.0, 530, 190, id="fifteen")],
)
async def test_what_exceeds_the_rate_ends_the_connection(
    commands_per_s: float, at_once: int, frames_per_s: int
) -> None:
    now = asyncio.get_running_loop().time
    began = now()
    async with listening(accepted(TEXT * 5000)) as port, connected(port, commands_per_s) as socket:
        count = await messages(socket)
        # A message costs a little more than a frame without a payload.
        assert at_once - 1 <= count <= at_once + frames_per_s * (now() - began)
        assert isinstance(socket, MeteredConnection)
        assert socket.is_flooded


async def test_answers_that_were_requested_exceed_no_rate() -> None:
    requested = asyncio.Event()

    async def answer_later(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        writer.write(accepted(b"")(head.partition(b"Sec-WebSocket-Key: ")[2].partition(b"\r\n")[0])[0])
        await requested.wait()
        writer.write(TEXT * 1000)
        await reader.read()
        writer.close()

    async with (
        await asyncio.start_server(answer_later, "127.0.0.1", 0) as server,
        connected(server.sockets[0].getsockname()[1]) as socket,
        asyncio.timeout(BOUND_S),
    ):
        assert isinstance(socket, MeteredConnection)
        for _ in range(200):
            socket.expect_answer()
        requested.set()
        assert [await socket.recv() for _ in range(1000)] == ["hi"] * 1000
        assert not socket.is_flooded


async def test_a_refusal_is_read_to_its_end() -> None:
    def refused(_key: bytes) -> list[bytes]:
        return [b"HTTP/1.1 403 Forbidden\r\nContent-Length: 3\r\n\r", b"\nnox"]

    async with listening(refused) as port:
        with pytest.raises(InvalidStatus):
            async with connected(port):
                raise AssertionError("it was refused")


async def test_a_relay_that_says_nothing_any_more_is_given_up() -> None:
    async with listening(accepted(TEXT)) as port, connected(port, silence_s=0.1) as socket:
        async with asyncio.timeout(BOUND_S):
            assert await messages(socket) == 1
        assert isinstance(socket, MeteredConnection)
        assert not socket.is_flooded


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
        connected(server.sockets[0].getsockname()[1]) as socket,
        asyncio.timeout(BOUND_S),
    ):
        assert isinstance(socket, MeteredConnection)
        before = socket.heard_at
        pinging.set()
        await ponged.wait()
        assert socket.heard_at > before
