"""A TCP proxy that a test has do to its connections what networks do."""

import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from enum import StrEnum
from typing import Self

from schemas.addresses import BrokerAddress


class LinkFault(StrEnum):
    """What happens to bytes on their way, in both directions."""

    DELAY = "delay"
    """They wait until the fault ends."""
    CUT = "cut"
    """The connections are ended, and new ones too, until the fault ends."""
    BLACK_HOLE = "black-hole"
    """They are lost; when the fault ends, the connections that lost some are ended."""
    TRUNCATE = "truncate"
    """Half of what comes next arrives, and then the end of the connection."""
    REORDER = "reorder"
    """The second half of what comes next arrives before the first."""
    CORRUPT = "corrupt"
    """One bit of what comes next arrives inverted."""


class FaultProxy:
    """Passes bytes on to ``target``, both ways, while no fault has begun. ``port`` 0 is any that is free."""

    def __init__(self, target: BrokerAddress, port: int = 0) -> None:
        self._target = target
        self._port = port
        self._server: asyncio.Server | None = None
        self._connections: list[_Connection] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._of_all: dict[int, LinkFault] = {}
        self._ids = itertools.count()

    @property
    def address(self) -> BrokerAddress:
        if self._server is None:
            raise RuntimeError("not started")
        return BrokerAddress("127.0.0.1", self._server.sockets[0].getsockname()[1])

    @asynccontextmanager
    async def running(self) -> AsyncIterator["FaultProxy"]:
        self._server = await asyncio.start_server(self._accepted, "127.0.0.1", self._port)
        try:
            yield self
        finally:
            self._server.close()
            self.cut()
            await asyncio.gather(*self._tasks)

    def cut(self) -> None:
        """Lose every connection that there is now; new ones are served."""
        for connection in self._connections:
            connection.cut()

    def begin(self, fault: LinkFault, which: int | None = None) -> int:
        """Have ``fault`` happen to every connection, also new ones, or to one that there is.

        ``which`` counts the connections as they were accepted, and around. Of several faults that a
        connection has at a time the newest counts. Returns what ends this one.
        """
        begun = next(self._ids)
        if which is None:
            self._of_all[begun] = fault
        affected = self._connections if which is None else self._nth(which)
        for connection in affected:
            connection.begin(begun, fault)
        return begun

    def end(self, begun: int) -> None:
        self._of_all.pop(begun, None)
        for connection in self._connections:
            connection.end(begun)

    def _nth(self, which: int) -> "list[_Connection]":
        return [self._connections[which % len(self._connections)]] if self._connections else []

    def _accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._connected(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if LinkFault.CUT in self._of_all.values():
            writer.transport.abort()
            return
        try:
            far_reader, far_writer = await asyncio.open_connection(self._target.host, self._target.port)
        except OSError:  # the target is not up
            writer.transport.abort()
            return
        connection = _Connection(writer, far_writer)
        self._connections.append(connection)
        for begun, fault in self._of_all.items():
            connection.begin(begun, fault)
        try:
            await asyncio.gather(connection.pump(reader, far_writer), connection.pump(far_reader, writer))
        finally:
            self._connections.remove(connection)


class _Connection:
    """One connection: the two ends to which the proxy writes, and the faults that it has."""

    def __init__(self, *writers: asyncio.StreamWriter) -> None:
        self._writers = writers
        self._faults: dict[int, LinkFault] = {}
        self._has_lost = False
        self._passes = asyncio.Event()
        self._passes.set()

    def begin(self, begun: int, fault: LinkFault) -> None:
        self._faults[begun] = fault
        if fault is LinkFault.CUT:
            self.cut()
        elif fault is LinkFault.DELAY:
            self._passes.clear()

    def end(self, begun: int) -> None:
        ended = self._faults.pop(begun, None)
        if LinkFault.DELAY not in self._faults.values():
            self._passes.set()
        if ended is LinkFault.BLACK_HOLE and self._has_lost:
            self.cut()

    @property
    def _fault(self) -> LinkFault | None:
        return next(reversed(self._faults.values()), None)

    def cut(self) -> None:
        self._passes.set()
        for writer in self._writers:
            writer.transport.abort()

    async def pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):
            while data := await reader.read(65536):
                await self._passes.wait()
                writer.write(self._changed(data))
                await writer.drain()
                if self._fault is LinkFault.TRUNCATE:
                    break
        writer.close()

    def _changed(self, data: bytes) -> bytes:
        half = len(data) // 2
        match self._fault:
            case LinkFault.BLACK_HOLE:
                self._has_lost = True
                return b""
            case LinkFault.TRUNCATE:
                return data[:half]
            case LinkFault.REORDER:
                return data[half:] + data[:half]
            case LinkFault.CORRUPT:
                return data[:half] + bytes([data[half] ^ 1]) + data[half + 1 :]
            case _:
                return data


# --- An HTTP proxy: it tunnels CONNECT to one address whatever name is asked for, and notes what was asked.


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
