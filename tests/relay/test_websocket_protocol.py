"""What a stranger's WebSocket may make the relay hold: over real sockets, with the product's own server."""

import asyncio
from contextlib import suppress

import pytest
from starlette.types import Receive, Scope, Send

from relay.connections import admit
from relay.websocket_protocol import ADMITTED_IN_SCOPE, MAX_BYTES_BEFORE_ADMISSION
from tests.fakes.polling import until
from tests.fakes.raw_connection import connected, write_until_cut
from tests.fakes.serving import Server

pytestmark = pytest.mark.asyncio(loop_scope="module")

BOUND_S = 10
UPGRADE = (
    b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n"
)
EMPTY_FRAME = b"\x81\x80\x00\x00\x00\x00"


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
            assert admit(scope, "node")
            scope[ADMITTED_IN_SCOPE] = True
        while (await receive())["type"] != "websocket.disconnect":
            self.received.put_nowait(None)
        self.ended.set()


async def test_a_stranger_cannot_flood_a_websocket(server: Server) -> None:
    door = Door(admitted=False)
    server.app = door
    reader, writer = await connected(server)
    writer.write(UPGRADE)
    async with asyncio.timeout(BOUND_S):
        await reader.readuntil(b"\r\n\r\n")
    await write_until_cut(reader, writer, EMPTY_FRAME * 1000)
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


async def test_the_time_of_a_stranger_runs_on_through_the_upgrade_and_that_of_a_node_does_not() -> None:
    async with Server.running(request_timeout_s=0.3) as server:
        node, stranger = Door(admitted=True), Door(admitted=False)
        server.app = node
        node_reader, node_writer = await connected(server)
        node_writer.write(UPGRADE)
        async with asyncio.timeout(BOUND_S):
            await node_reader.readuntil(b"\r\n\r\n")
        server.app = stranger
        reader, writer = await connected(server)
        writer.write(UPGRADE)
        async with asyncio.timeout(BOUND_S):
            with suppress(ConnectionError):
                await reader.read()
            await stranger.ended.wait()
        writer.close()
        await until(lambda: len(server.connections) == 1)
        node_writer.write(EMPTY_FRAME)
        async with asyncio.timeout(BOUND_S):
            await node.received.get()
        node_writer.close()
