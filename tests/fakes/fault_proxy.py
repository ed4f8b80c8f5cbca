"""A TCP proxy whose connections a test can cut."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from schemas.addresses import BrokerAddress


class FaultProxy:
    """Passes bytes on to ``target``, both ways, until a test cuts its connections."""

    def __init__(self, target: BrokerAddress) -> None:
        self._target = target
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def address(self) -> BrokerAddress:
        """Where it listens."""
        if self._server is None:
            raise RuntimeError("not started")
        return BrokerAddress("127.0.0.1", self._server.sockets[0].getsockname()[1])

    @asynccontextmanager
    async def running(self) -> AsyncIterator["FaultProxy"]:
        """Serve until the end of the block."""
        self._server = await asyncio.start_server(self._accepted, "127.0.0.1", 0)
        try:
            yield self
        finally:
            self._server.close()
            self.cut()
            await asyncio.gather(*self._tasks)

    def cut(self) -> None:
        """Lose every connection that there is now; new ones are served."""
        for writer in self._writers:
            writer.transport.abort()

    def _accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._connected(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            far_reader, far_writer = await asyncio.open_connection(self._target.host, self._target.port)
        except OSError:  # the target is not up
            writer.transport.abort()
            return
        pair = {writer, far_writer}
        self._writers |= pair
        try:
            await asyncio.gather(_pump(reader, far_writer), _pump(far_reader, writer))
        finally:
            self._writers -= pair


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(ConnectionError):
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
    writer.close()
