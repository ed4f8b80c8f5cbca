"""Clients that take their time: five sorts of them, in equal parts, each as slow as its timeout allows.

Run as a process, it listens on a port of its own once all are connected, so that the measurement knows when
to begin. Must be a process of its own where anything is measured: what these clients cost is the relay's to
bear.
"""

import asyncio
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from schemas.addresses import CONNECT_PATH
from schemas.frames import SUBPROTOCOL

_BETWEEN_BYTES_S = 0.25
_BETWEEN_ATTEMPTS_S = 0.25
_UNREAD_REQUESTS = 50
_UNREAD_PATH = "/schemas/manifest@1.1.0"
_RECEIVE_BUFFER = 4096
_CONNECTING_AT_ONCE = 50

_Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class SlowClients:
    """``count`` slow clients of the relay at ``port``; ``token`` is what those with a body present."""

    def __init__(self, port: int, count: int, token: str) -> None:
        self._port = port
        self._count = count
        self._token = token
        self._connecting = asyncio.Semaphore(_CONNECTING_AT_ONCE)
        self._connected = 0
        self._all_connected = asyncio.Event()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Hold the clients; the block begins when each has connected for the first time."""
        sorts = (self._half_a_head, self._byte_at_a_time, self._no_body, self._silent_node, self._not_reading)
        tasks = [asyncio.create_task(self._keep_up(sorts[turn % len(sorts)])) for turn in range(self._count)]
        try:
            await self._all_connected.wait()
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _keep_up(self, sort: Callable[[_Streams], Awaitable[None]]) -> None:
        """Connect again whenever the relay has disconnected."""
        first = True
        while True:
            with suppress(OSError):
                async with self._connecting:
                    streams = await self._connect()
                if first:
                    first = False
                    self._connected += 1
                    if self._connected == self._count:
                        self._all_connected.set()
                try:
                    await sort(streams)
                finally:
                    streams[1].transport.abort()
            await asyncio.sleep(_BETWEEN_ATTEMPTS_S)

    async def _connect(self) -> _Streams:
        connection = socket.socket()
        try:
            # The less a client takes in unread, the sooner the relay has to keep it.
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _RECEIVE_BUFFER)
            connection.setblocking(False)  # noqa: FBT003 - the standard library has no other name for it
            await asyncio.get_running_loop().sock_connect(connection, ("127.0.0.1", self._port))
            return await asyncio.open_connection(sock=connection)
        except BaseException:
            connection.close()
            raise

    async def _half_a_head(self, streams: _Streams) -> None:
        reader, writer = streams
        writer.write(self._head("POST /mcp")[:-4])
        await reader.read()

    async def _byte_at_a_time(self, streams: _Streams) -> None:
        _, writer = streams
        head = self._head("POST /mcp", *(f"X-{number}: y" for number in range(1000)))
        for start in range(len(head)):
            writer.write(head[start : start + 1])
            await writer.drain()
            await asyncio.sleep(_BETWEEN_BYTES_S)

    async def _no_body(self, streams: _Streams) -> None:
        reader, writer = streams
        fields = [
            "Content-Type: application/json",
            "Accept: application/json, text/event-stream",
            f"Authorization: Bearer {self._token}",
            "Content-Length: 1000",
        ]
        writer.write(self._head("POST /mcp", *fields))
        await reader.read()

    async def _silent_node(self, streams: _Streams) -> None:
        reader, writer = streams
        fields = [
            "Upgrade: websocket",
            "Connection: Upgrade",
            "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==",
            "Sec-WebSocket-Version: 13",
            f"Sec-WebSocket-Protocol: {SUBPROTOCOL}",
        ]
        writer.write(self._head(f"GET {CONNECT_PATH}", *fields))
        await reader.read()

    async def _not_reading(self, streams: _Streams) -> None:
        _, writer = streams
        transport = writer.transport
        if isinstance(transport, asyncio.ReadTransport):
            transport.pause_reading()
        for _ in range(_UNREAD_REQUESTS):
            writer.write(self._head(f"GET {_UNREAD_PATH}"))
        await asyncio.Event().wait()

    def _head(self, request: str, *fields: str) -> bytes:
        lines = [f"{request} HTTP/1.1", f"Host: 127.0.0.1:{self._port}", *fields, "", ""]
        return "\r\n".join(lines).encode("ascii")


async def main(port: int, count: int, token: str, ready_port: int) -> None:
    """Hold ``count`` clients of ``port``; listen on ``ready_port`` once they are connected."""

    async def greet(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    async with SlowClients(port, count, token).running():
        ready = await asyncio.start_server(greet, "127.0.0.1", ready_port)
        await ready.serve_forever()


if __name__ == "__main__":
    asyncio.run(
        main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]).read_text("ascii"), int(sys.argv[4]))
    )
