"""What a stranger may make the relay hold: over real sockets, with the product's own server."""

import asyncio

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from relay.transport import ADMITTED_IN_SCOPE, MAX_BYTES_BEFORE_ADMISSION, MAX_HEAD_BYTES
from tests.fakes.serving import Server

pytestmark = pytest.mark.asyncio(loop_scope="module")

BOUND_S = 10
UPGRADE = (
    b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n"
)
EMPTY_FRAME = b"\x81\x80\x00\x00\x00\x00"


async def size_of_body(request: Request) -> JSONResponse:
    return JSONResponse(len(await request.body()))


class Door:
    """An application that accepts WebSockets, of strangers or of nodes, and counts what comes."""

    def __init__(self, *, admitted: bool) -> None:
        self._admitted = admitted
        self.received: asyncio.Queue[None] = asyncio.Queue()
        self.ended = asyncio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        await send({"type": "websocket.accept"})
        if self._admitted:
            scope[ADMITTED_IN_SCOPE] = True
        while (await receive())["type"] != "websocket.disconnect":
            self.received.put_nowait(None)
        self.ended.set()


async def connected(server: Server) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection(server.address.host, server.address.port)


async def until_cut(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, chunk: bytes) -> int:
    """Send ``chunk`` until the relay hangs up, and return how many bytes it let itself be sent."""
    sent = 0
    async with asyncio.timeout(BOUND_S):
        try:
            while not reader.at_eof():
                writer.write(chunk)
                await writer.drain()
                sent += len(chunk)
        except (OSError, ConnectionError):
            pass
    writer.close()
    return sent


@pytest.mark.parametrize(
    "start",
    [
        pytest.param(b"GET / HTTP/1.1\r\nX: ", id="one header"),
        pytest.param(b"GET /", id="the path"),
    ],
)
async def test_a_head_that_never_ends_ends_the_connection(server: Server, start: bytes) -> None:
    server.app = Starlette()
    reader, writer = await connected(server)
    writer.write(start)
    # What is on its way in buffers comes on top of the limit; it is not held.
    assert await until_cut(reader, writer, b"x" * 16_384) < MAX_HEAD_BYTES + 32 * 1024 * 1024


async def test_a_body_may_be_longer_than_a_head(server: Server) -> None:
    server.app = Starlette(routes=[Route("/", size_of_body, methods=["POST"])])
    reader, writer = await connected(server)
    size = MAX_HEAD_BYTES * 4
    writer.write(b"POST / HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: %d\r\n\r\n" % size + b"x" * size)
    async with asyncio.timeout(BOUND_S):
        head = await reader.readuntil(b"\r\n\r\n")
        body = await reader.readexactly(len(str(size)))
    writer.close()
    assert head.startswith(b"HTTP/1.1 200")
    assert int(body) == size


async def test_a_stranger_cannot_flood_a_websocket(server: Server) -> None:
    door = Door(admitted=False)
    server.app = door
    reader, writer = await connected(server)
    writer.write(UPGRADE)
    async with asyncio.timeout(BOUND_S):
        await reader.readuntil(b"\r\n\r\n")
    await until_cut(reader, writer, EMPTY_FRAME * 1000)
    async with asyncio.timeout(BOUND_S):
        await door.ended.wait()
    assert door.received.qsize() <= MAX_BYTES_BEFORE_ADMISSION // len(EMPTY_FRAME)


async def test_a_node_that_was_admitted_may_send_more(server: Server) -> None:
    door = Door(admitted=True)
    server.app = door
    reader, writer = await connected(server)
    writer.write(UPGRADE)
    async with asyncio.timeout(BOUND_S):
        await reader.readuntil(b"\r\n\r\n")
        wanted = 2 * MAX_BYTES_BEFORE_ADMISSION // len(EMPTY_FRAME)
        for _ in range(wanted // 100):
            writer.write(EMPTY_FRAME * 100)
            for _ in range(100):
                await door.received.get()
    assert not door.ended.is_set()
    writer.close()
    async with asyncio.timeout(BOUND_S):
        await door.ended.wait()
