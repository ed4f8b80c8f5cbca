"""The relay's own server, with and without TLS, on both of the loops that it may run on."""

import asyncio
import contextlib
import resource
import socket
import ssl
import time
import warnings
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import uvloop
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from relay.http.connections import AcceptedConnection, Bounds, Connections
from relay.http.http_protocol import MAX_HEAD_BYTES
from relay.http.listener import SOCKET_TIMEOUTS, Acceptor, SocketTimeouts, bind, bind_unix
from relay.http.websocket_protocol import FRAMES_AT_ONCE, BoundedWebSocket, SocketClosedError
from relay.observability.metrics import Metrics
from relay.pki.relay_tls import LiveContext
from relay.settings.config import TlsFiles
from schemas.addresses import HostPort
from schemas.tls import client_context
from tests.fakes.background import in_background
from tests.fakes.hub import counted
from tests.fakes.polling import until
from tests.fakes.raw_http import UPGRADE
from tests.fakes.serving import Server
from tests.fakes.tls_broker import PlayedAuthority

pytestmark = pytest.mark.integration

BOUND_S = 30
SOON_S = 0.1
HTTP = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"
HELLO = b"\x16\x03\x01\x02\x00\x01\x00"  # how a handshake begins
PING = b"\x89\x80\x00\x00\x00\x00"
GOODBYE = b"\x88\x80\x00\x00\x00\x00"
PONG = 0x8A
LONG = b"x" * 1024 * 1024
EMPTY_FRAME = b"\x81\x80\x00\x00\x00\x00"

Run = Callable[[Coroutine[Any, Any, None]], None]


@pytest.fixture(params=[asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Iterator[Run]:
    """Run a scene on each of the loops."""
    with asyncio.Runner(loop_factory=request.param) as runner:

        def run(scene: Coroutine[Any, Any, None]) -> None:
            async def bounded() -> None:
                async with asyncio.timeout(BOUND_S):
                    await scene

            runner.run(bounded())

        yield run


@pytest.fixture
def authority(tmp_path: Path) -> PlayedAuthority:
    return PlayedAuthority(tmp_path, time.time_ns() // 1_000_000)


@pytest.fixture
def tls(authority: PlayedAuthority) -> ssl.SSLContext:
    shown = authority.server("relay")
    return LiveContext(TlsFiles(shown.certificate, shown.key)).context


async def hello(_request: object) -> PlainTextResponse:
    return PlainTextResponse("hello")


APP = Starlette(routes=[Route("/", hello)])


class Listener:
    """An application that lets WebSockets in, of strangers or of nodes, and tells when one is over."""

    def __init__(self, *, admits: bool = False) -> None:
        self._admits = admits
        self.received = 0
        self.ended = asyncio.Event()

    async def __call__(self, socket: BoundedWebSocket) -> None:
        socket.accept("")
        if self._admits:
            socket.meter.admit()
        with contextlib.suppress(SocketClosedError):
            while await socket.receive() is not None:
                self.received += 1
        self.ended.set()


async def connected(
    server: Server, context: ssl.SSLContext | None = None
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection(server.address.host, server.address.port, ssl=context)


async def flood(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, chunk: bytes) -> None:
    """Send ``chunk`` until the server hangs up."""
    with contextlib.suppress(OSError):
        while not reader.at_eof():
            writer.write(chunk)
            await writer.drain()
    writer.transport.abort()


def test_a_port_that_is_taken_is_said_by_its_address() -> None:
    with bind(HostPort("127.0.0.1", 0)) as taken:
        taken.listen()
        address = HostPort(*taken.getsockname())
        with pytest.raises(OSError, match=f"cannot listen on {address}"):
            bind(address)


def test_over_tls_a_client_that_trusts_the_root_is_served(
    run: Run, tls: ssl.SSLContext, authority: PlayedAuthority
) -> None:
    async def scene() -> None:
        async with Server.running(tls) as server:
            server.app = APP
            reader, writer = await connected(server, client_context(authority.servers.root_pem))
            writer.write(HTTP)
            assert (await reader.readuntil(b"hello")).startswith(b"HTTP/1.1 200")
            writer.close()
            with pytest.raises(ssl.SSLCertVerificationError):
                await connected(server, client_context())

    run(scene())


@pytest.mark.parametrize("said", [b"", HELLO], ids=["nothing", "its beginning"])
def test_a_handshake_that_does_not_end_is_given_up(run: Run, tls: ssl.SSLContext, said: bytes) -> None:
    async def scene() -> None:
        async with Server.running(tls, timeouts=SocketTimeouts(handshake_s=SOON_S)) as server:
            reader, writer = await connected(server)
            writer.write(said)
            with contextlib.suppress(ConnectionError):
                await reader.read()
            writer.close()

    run(scene())


def test_what_is_no_tls_is_not_answered(run: Run, tls: ssl.SSLContext) -> None:
    async def scene() -> None:
        async with Server.running(tls) as server:
            server.app = APP
            reader, writer = await connected(server)
            writer.write(HTTP)
            answer = b""
            with contextlib.suppress(ConnectionError):
                answer = await reader.read()
            assert b"HTTP" not in answer
            writer.close()

    run(scene())


def test_an_old_version_of_tls_is_refused(run: Run, tls: ssl.SSLContext, authority: PlayedAuthority) -> None:
    def only(version: ssl.TLSVersion) -> ssl.SSLContext:
        context = client_context(authority.servers.root_pem)
        context.set_ciphers("ALL:@SECLEVEL=0")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            context.minimum_version = context.maximum_version = version
        return context

    async def scene() -> None:
        async with Server.running(tls) as server:
            _, writer = await connected(server, only(ssl.TLSVersion.TLSv1_2))
            writer.close()
            # Without a word, or with one that says so.
            with pytest.raises((ConnectionResetError, ssl.SSLError)):
                await connected(server, only(ssl.TLSVersion.TLSv1_1))

    run(scene())


def test_the_limits_of_a_head_hold_over_tls(
    run: Run, tls: ssl.SSLContext, authority: PlayedAuthority
) -> None:
    async def scene() -> None:
        async with Server.running(tls) as server:
            server.app = APP
            reader, writer = await connected(server, client_context(authority.servers.root_pem))
            writer.write(b"GET / HTTP/1.1\r\nX: ")
            await flood(reader, writer, b"x" * (MAX_HEAD_BYTES // 4))

    run(scene())


@pytest.mark.parametrize(
    ("admits", "frame"), [(False, EMPTY_FRAME), (True, PING)], ids=["a stranger", "a node"]
)
def test_a_websocket_cannot_be_flooded_over_tls(
    run: Run, tls: ssl.SSLContext, authority: PlayedAuthority, frame: bytes, *, admits: bool
) -> None:
    async def scene() -> None:
        listener = Listener(admits=admits)
        async with Server.running(tls) as server:
            server.serve_socket = listener
            reader, writer = await connected(server, client_context(authority.servers.root_pem))
            writer.write(UPGRADE)
            await reader.readuntil(b"\r\n\r\n")
            await flood(reader, writer, frame * 1000)
            await listener.ended.wait()

    run(scene())


class Sender:
    """An application whose answers are longer than what buffers take, over HTTP and over WebSockets."""

    def __init__(self) -> None:
        self.ended = asyncio.Event()

    async def __call__(self, scope: Scope, _receive: Receive, send: Send) -> None:
        try:
            assert scope["type"] == "http"
            await send({"type": "http.response.start", "status": 200, "headers": []})
            for _ in range(1000):
                await send({"type": "http.response.body", "body": LONG, "more_body": True})
        finally:
            self.ended.set()

    async def serve_socket(self, socket: BoundedWebSocket) -> None:
        socket.accept("")
        socket.meter.admit()
        with contextlib.suppress(SocketClosedError):
            await socket.send(LONG.decode() * 32)
            while await socket.receive() is not None:
                pass
        self.ended.set()


@pytest.mark.parametrize("asked", [HTTP, UPGRADE], ids=["http", "websocket"])
@pytest.mark.parametrize("over_tls", [False, True], ids=["plain", "tls"])
def test_a_peer_that_does_not_read_is_disconnected(
    run: Run, tls: ssl.SSLContext, authority: PlayedAuthority, asked: bytes, *, over_tls: bool
) -> None:
    async def scene() -> None:
        served, client = (tls, client_context(authority.servers.root_pem)) if over_tls else (None, None)
        async with Server.running(served, SocketTimeouts(write_s=SOON_S)) as server:
            sender = Sender()
            server.app, server.serve_socket = sender, sender.serve_socket
            _, writer = await connected(server, client)
            writer.write(asked)  # and nothing of the answer is read
            await sender.ended.wait()
            await until(lambda: not len(server.connections))
            writer.transport.abort()

    run(scene())


@pytest.mark.parametrize("over_tls", [False, True], ids=["plain", "tls"])
def test_a_stop_closes_what_is_left(
    run: Run,
    tls: ssl.SSLContext,
    authority: PlayedAuthority,
    monkeypatch: pytest.MonkeyPatch,
    *,
    over_tls: bool,
) -> None:
    monkeypatch.setattr("relay.http.listener._SHUTDOWN_S", SOON_S)

    async def scene() -> None:
        served, client = (tls, client_context(authority.servers.root_pem)) if over_tls else (None, None)
        async with Server.running(served) as server:
            server.app, server.serve_socket = Sender(), Sender().serve_socket
            held: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []
            malformed = UPGRADE.replace(b"\r\n\r\n", b"\r\nContent-Length: 5\r\n\r\n")
            for said in (b"", b"GET / HT", HTTP * 2, UPGRADE, malformed):
                held.append(await connected(server, client))
                held[-1][1].write(said)  # and nothing of the answer is read
            await until(lambda: len(server.connections) >= len(held) - 1)
            sender = Sender()
            server.app, server.serve_socket = sender, sender.serve_socket
            held.append(await connected(server, client))
            held[-1][1].write(UPGRADE)
            await held[-1][0].readuntil(b"\r\n\r\n")
            held[-1][1].write(GOODBYE)  # after which nothing may be said to it any more
            await sender.ended.wait()
        await until(lambda: not len(server.connections))
        for _, writer in held:
            writer.transport.abort()

    run(scene())


def test_messages_over_the_rate_wait_for_their_turn_over_tls(
    run: Run, tls: ssl.SSLContext, authority: PlayedAuthority
) -> None:
    count = int(FRAMES_AT_ONCE) + 3

    async def scene() -> None:
        listener = Listener(admits=True)
        async with Server.running(tls) as server:
            server.serve_socket = listener
            reader, writer = await connected(server, client_context(authority.servers.root_pem))
            writer.write(UPGRADE)
            await reader.readuntil(b"\r\n\r\n")
            # In pieces, so that reading stops and goes on.
            for _ in range(count):
                writer.write(EMPTY_FRAME)
                await writer.drain()
            writer.write(GOODBYE)
            await listener.ended.wait()
            writer.transport.abort()
        assert listener.received == count

    run(scene())


def test_at_the_end_nodes_stay_connected_and_idle_clients_do_not_until_it_is_drained(run: Run) -> None:
    async def scene() -> None:
        started, draining, drained = asyncio.Event(), asyncio.Event(), asyncio.Event()

        async def drain() -> None:
            draining.set()
            await drained.wait()

        async def stay() -> None:
            async with Server.running(started=started.set, drain=drain) as server:
                server.app = Starlette(routes=[Route("/", lambda _request: PlainTextResponse("hello"))])
                server.serve_socket = Listener()
                await started.wait()
                node, client = await connected(server, None), await connected(server, None)
                client[1].write(HTTP)
                await client[0].readuntil(b"hello")
                node[1].write(UPGRADE)
                await node[0].readuntil(b"\r\n\r\n")
                ends.put_nowait((node, client))

        ends = asyncio.Queue[Any]()
        serving = asyncio.create_task(stay())
        node, client = await ends.get()
        await draining.wait()
        assert await client[0].read() == b""
        node[1].write(PING)
        assert (await node[0].readexactly(2))[0] == PONG
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection(*client[1].get_extra_info("peername"))
        drained.set()
        assert (await node[0].readexactly(4))[2:] == (1012).to_bytes(2, "big")
        node[1].close()
        client[1].close()
        await serving

    run(scene())


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
            try:
                async with in_background(port.acceptor.run()):
                    yield port
            finally:
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


# --- a Unix socket --------------------------------------------------------------------------------------


def test_a_unix_socket_that_was_left_is_replaced_and_one_that_is_served_is_not(tmp_path: Path) -> None:
    path = tmp_path / "metrics.sock"
    bind_unix(path).close()
    with bind_unix(path) as listener:
        listener.listen()
        with pytest.raises(OSError, match=f"cannot listen on {path}: Address already in use"):
            bind_unix(path)


def test_a_file_in_the_place_of_a_unix_socket_stays(tmp_path: Path) -> None:
    file = tmp_path / "notes"
    file.write_text("mine")
    with pytest.raises(OSError, match="cannot listen"):
        bind_unix(file)
    assert file.read_text() == "mine"


@pytest.mark.parametrize(("directory", "mode"), [(0o700, 0o600), (0o750, 0o660), (0o755, 0o600)])
def test_a_unix_socket_is_the_groups_where_its_directory_is(
    tmp_path: Path, directory: int, mode: int
) -> None:
    tmp_path.chmod(directory)
    with bind_unix(tmp_path / "metrics.sock"):
        assert (tmp_path / "metrics.sock").stat().st_mode & 0o777 == mode
