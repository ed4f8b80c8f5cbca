"""A proxy in front of a nats-server that holds a client's UNSUB, and all that the client sends after it."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Self

from schemas.addresses import HostPort

_UNSUB = b"UNSUB "
_PassOn = Callable[[bytes, asyncio.StreamWriter], Awaitable[None]]


class UnsubscribeGate:
    """Passes everything on to ``target`` until it is ``armed``.

    Attributes:
        holds: set once a client's UNSUB is held.
    """

    def __init__(self, target: HostPort) -> None:
        self._target = target
        self._is_armed = False
        self._opened = asyncio.Event()
        self._served: set[asyncio.Task[None]] = set()
        self._writers: list[asyncio.StreamWriter] = []
        self._server: asyncio.Server | None = None
        self.holds = asyncio.Event()

    @property
    def port(self) -> int:
        """Where it listens on loopback."""
        assert self._server is not None
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Self]:
        """Serve until the end of the block."""
        self._server = await asyncio.start_server(self._accepted, "127.0.0.1", 0)
        try:
            yield self
        finally:
            self._server.close()
            self.open()
            for writer in self._writers:
                writer.transport.abort()
            await asyncio.gather(*self._served)

    def arm(self) -> None:
        """Hold the next UNSUB, and what follows it, until it is opened."""
        self._is_armed = True

    def open(self) -> None:
        """Pass on what is held, and everything from now on."""
        self._is_armed = False
        self._opened.set()

    def _accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._served.add(asyncio.create_task(self._serve(reader, writer)))

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection(self._target.host, self._target.port)
        self._writers += (writer, far_writer)
        await asyncio.gather(
            self._pump(reader, far_writer, self._held_back), self._pump(far_reader, writer, _unchanged)
        )

    async def _pump(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, pass_on: _PassOn
    ) -> None:
        with suppress(ConnectionError):
            while data := await reader.read(65536):
                await pass_on(data, writer)
                await writer.drain()
        writer.close()

    async def _held_back(self, data: bytes, writer: asyncio.StreamWriter) -> None:
        before, found, rest = data.partition(_UNSUB) if self._is_armed else (data, b"", b"")
        writer.write(before)
        if found:
            self.holds.set()
            await self._opened.wait()
            writer.write(found + rest)


async def _unchanged(data: bytes, writer: asyncio.StreamWriter) -> None:
    writer.write(data)
