"""Accepting within bounds, over real sockets; what is spoken does not matter."""

import asyncio
import resource
import socket
import ssl
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest

from relay.http.acceptor import SOCKET_TIMEOUTS, Acceptor, SocketTimeouts
from relay.http.connections import AcceptedConnection, Bounds, Connections
from relay.http.listener import bind
from relay.observability.metrics import Metrics
from relay.pki.relay_tls import LiveContext
from relay.settings.config import TlsFiles
from schemas.addresses import HostPort
from tests.fakes.hub import counted
from tests.fakes.polling import until
from tests.fakes.tls_broker import PlayedAuthority

pytestmark = pytest.mark.integration

BOUND_S = 10


@pytest.fixture
def tls(tmp_path: Path) -> ssl.SSLContext:
    shown = PlayedAuthority(tmp_path, time.time_ns() // 1_000_000).server("relay")
    return LiveContext(TlsFiles(shown.certificate, shown.key)).context


class Speaker(asyncio.Protocol):
    """Says ``greeting`` once, and counts its connection."""

    def __init__(self, connection: AcceptedConnection, greeting: bytes) -> None:
        self._connection = connection
        self._greeting = greeting

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self._connection.begin(transport.abort)
        self._connection.rest()
        transport.write(self._greeting)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - as asyncio's
        self._connection.end()


class Port:
    """An acceptor on a port of its own."""

    def __init__(
        self,
        listener: socket.socket,
        bounds: Bounds,
        timeouts: SocketTimeouts,
        greeting: bytes,
        tls: ssl.SSLContext | None,
    ) -> None:
        self.listener = listener
        self.address = listener.getsockname()
        self.speakers: list[Speaker] = []
        self._greeting = greeting
        self._metrics = Metrics()
        self.connections = Connections(bounds, self._metrics.connections_refused)
        self.acceptor = Acceptor(listener, self.connections, self._speaker, tls, timeouts)

    def _speaker(self, connection: AcceptedConnection) -> Speaker:
        self.speakers.append(Speaker(connection, self._greeting))
        return self.speakers[-1]

    def refused(self, reason: str) -> float:
        return counted(self._metrics, "connections_refused_total", reason=reason)

    async def until(self, held: int) -> None:
        await until(lambda: len(self.connections) == held)

    @classmethod
    @asynccontextmanager
    async def running(
        cls,
        bounds: Bounds,
        timeouts: SocketTimeouts = SOCKET_TIMEOUTS,
        greeting: bytes = b"hello",
        tls: ssl.SSLContext | None = None,
    ) -> AsyncIterator["Port"]:
        with bind(HostPort("127.0.0.1", 0)) as listener:
            listener.listen()
            port = cls(listener, bounds, timeouts, greeting, tls)
            port.acceptor.listen(100)
            task = asyncio.create_task(port.acceptor.run())
            try:
                yield port
            finally:
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task
                port.connections.abort()


async def test_what_there_is_no_room_for_is_closed_at_once_and_the_others_stay() -> None:
    async with Port.running(Bounds(total=4, unauthenticated=2, per_address=2, per_holder=2)) as port:
        held = [await asyncio.open_connection(*port.address) for _ in range(2)]
        async with asyncio.timeout(BOUND_S):
            assert [await reader.readexactly(5) for reader, _ in held] == [b"hello"] * 2
            reader, writer = await asyncio.open_connection(*port.address)
            with suppress(ConnectionError):
                assert await reader.read() == b""
            writer.close()
        assert port.refused("strangers") == 1
        held.pop()[1].close()
        await port.until(1)
        reader, writer = await asyncio.open_connection(*port.address)
        async with asyncio.timeout(BOUND_S):
            assert await reader.readexactly(5) == b"hello"
        writer.close()
        held.pop()[1].close()
        await port.until(0)


async def test_what_is_written_does_not_wait_for_the_acknowledgement_of_what_was() -> None:
    async with Port.running(Bounds(total=4, unauthenticated=2, per_address=2, per_holder=2)) as port:
        reader, writer = await asyncio.open_connection(*port.address)
        async with asyncio.timeout(BOUND_S):
            assert await reader.readexactly(5) == b"hello"
        accepted = port.speakers[0].transport.get_extra_info("socket")
        assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        writer.close()
        await port.until(0)


async def test_the_handshake_that_waits_longest_is_aborted_for_another(tls: ssl.SSLContext) -> None:
    bounds = Bounds(total=4, unauthenticated=2, per_address=2, per_holder=2)
    async with Port.running(bounds, tls=tls) as port:
        held = [await asyncio.open_connection(*port.address) for _ in range(2)]
        await port.until(2)
        held.append(await asyncio.open_connection(*port.address))
        async with asyncio.timeout(BOUND_S):
            with suppress(ConnectionError):
                assert await held[0][0].read() == b""
        await port.until(2)
        for _, writer in held:
            writer.close()
        await port.until(0)


async def test_a_peer_that_reads_nothing_of_what_is_sent_is_disconnected() -> None:
    bounds = Bounds.below(1024)
    async with Port.running(bounds, SocketTimeouts(write_s=0.2), b"x" * 32 * 1024 * 1024) as port:
        with socket.create_connection(port.address):
            await until(lambda: port.speakers)
            await port.until(0)


async def test_without_descriptors_it_waits_and_goes_on_when_there_are_some() -> None:
    async with Port.running(Bounds.below(1024)) as port:
        with socket.socket() as client:
            client.setblocking(False)  # noqa: FBT003 - as the standard library has it
            limits = resource.getrlimit(resource.RLIMIT_NOFILE)
            resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
            try:
                with suppress(BlockingIOError):
                    client.connect(port.address)
                await until(lambda: port.refused("descriptors"))
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, limits)
            await port.until(1)


async def test_a_listener_that_is_of_no_use_is_an_error() -> None:
    with bind(HostPort("127.0.0.1", 0)) as listener:
        connections = Connections(Bounds.below(1024), Metrics().connections_refused)
        acceptor = Acceptor(
            listener, connections, lambda connection: Speaker(connection, b""), None, SOCKET_TIMEOUTS
        )
        listener.close()
        with pytest.raises(OSError, match="Bad file descriptor"):
            acceptor.listen(100)
