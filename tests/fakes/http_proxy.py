"""An HTTP proxy: it tunnels CONNECT to one address whatever name is asked for, and notes what was asked."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Self

_HEAD_END = b"\r\n\r\n"


class HttpProxy:
    """Attributes: ``asked`` has the head of each request; ``url`` is for the environment."""

    def __init__(self, target: tuple[str, int] | None) -> None:
        self._target = target
        self.asked: list[bytes] = []
        self.url = ""

    @classmethod
    @asynccontextmanager
    async def running(cls, target: tuple[str, int] | None) -> AsyncIterator[Self]:
        """Tunnel to ``target``; without one each request is answered 502."""
        proxy = cls(target)
        server = await asyncio.start_server(proxy._serve, "127.0.0.1", 0)
        proxy.url = f"http://user:p%40ss@127.0.0.1:{server.sockets[0].getsockname()[1]}"
        try:
            yield proxy
        finally:
            server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError, asyncio.IncompleteReadError):
            self.asked.append(await reader.readuntil(_HEAD_END))
            if self._target is None:
                writer.write(b"HTTP/1.1 502 Bad Gateway\r\nContent-Length: 0\r\n\r\n")
                await writer.drain()
            else:
                writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
                inner_reader, inner_writer = await asyncio.open_connection(*self._target)
                await asyncio.gather(_pipe(reader, inner_writer), _pipe(inner_reader, writer))
        writer.close()


async def _pipe(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while piece := await reader.read(65_536):
            writer.write(piece)
            await writer.drain()
    writer.close()
