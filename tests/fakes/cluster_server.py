"""A real nats-server for the relays of a test's fleet, in a process of its own."""

import asyncio
import json
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

from nats.aio.client import Client

from relay.broker.nats_server import find_nats_server
from relay.cli.cluster import directory_of, set_up
from relay.cluster.client import administering
from relay.cluster.credentials import new_nkey, read_credentials
from relay.cluster.jetstream import make_streams
from relay.cluster.server_config import Routes, User, account_file, account_text, server_text
from relay.pki.issuing import issue_client
from relay.settings.config import ClusterConfig, ClusterServer, account_of
from schemas.addresses import HostPort
from schemas.files import PRIVATE, write_atomic
from schemas.keys import private_key_to_pem
from tests.fakes.ports import unused_port
from tests.fakes.signer import SimulatedCa, key_named

FLEET = "main"
BOUND_S = 30
ACCOUNT = account_of(FLEET)
_POLL_S = 0.01


class NatsServer:
    """A server on loopback with the account of one fleet, with its files in ``directory``.

    ``others`` are accounts besides, and ``users`` further users of this one, with the permissions of each.
    What an administrator makes there is made when it starts.
    """

    copies = 1

    def __init__(self, directory: Path, others: str = "", users: Sequence[Mapping[str, object]] = ()) -> None:
        self.address = HostPort("127.0.0.1", unused_port())
        self.directory = self._directory = directory
        self.others, self._more_users = others, users
        self._process: subprocess.Popen[bytes] | None = None
        self.credentials, self.administrator = directory / "relay.seed", directory / "administrator.seed"
        self.users = [new_user(file) for file in (self.administrator, self.credentials)]

    @classmethod
    @contextmanager
    def running(
        cls, directory: Path, others: str = "", users: Sequence[Mapping[str, object]] = ()
    ) -> Iterator[Self]:
        """Hold one that accepts connections."""
        server = cls(directory, others, users)
        server.start()
        try:
            yield server
        finally:
            server.stop()

    @property
    def url(self) -> str:
        """The server as ``--cluster`` names it."""
        return f"nats://{self.address}"

    @property
    def config(self) -> ClusterConfig:
        """What a relay of the fleet is configured with."""
        server = ClusterServer(self.address.host, self.address.port, tls=False)
        return ClusterConfig((server,), self.credentials, None, FLEET, ACCOUNT)

    def write_config(self) -> Path:
        """Write what it is configured with; return the file."""
        config = self.directory / "nats-server.conf"
        account = account_text(ACCOUNT, FLEET, self.users[0], self.users[1:])
        config.with_name(account_file(ACCOUNT)).write_text(self._with_users(account), "utf-8")
        config.write_text(self.config_text() + self.others, "utf-8")
        return config

    def _with_users(self, account: str) -> str:
        more = "".join(f"    {json.dumps(user)}\n" for user in self._more_users)
        return account.replace("  users: [\n", f"  users: [\n{more}")

    def config_text(self) -> str:
        """Return the file that names the others."""
        store = str(self.directory / "store")
        return server_text("edge-cluster", self.address, ACCOUNT, store=store, tls=False)

    def start(self) -> None:
        """Start it, and return when it accepts connections and has what relays need."""
        self.start_empty()
        try:
            self.make_streams()
        except BaseException:
            self.stop()
            raise

    def make_streams(self) -> None:
        """Make the stream and the bucket of the fleet where they are not there, as its administrator."""
        in_thread(self._make_streams)

    async def _make_streams(self) -> None:
        async with self.administered() as client:
            await make_streams(client, FLEET, self.copies, BOUND_S)

    def start_empty(self) -> None:
        config = self.write_config()
        log = self._directory / "nats-server.log"
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                [str(find_nats_server()), "-c", str(config)],
                cwd=self.directory,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )
        give_up = time.monotonic() + BOUND_S
        while self._process.poll() is None and time.monotonic() < give_up:
            try:
                socket.create_connection((self.address.host, self.address.port), 1).close()
            except OSError:
                time.sleep(_POLL_S)  # a program says in no other way that it listens
            else:
                return
        self.stop()
        raise AssertionError(log.read_text("utf-8"))

    @asynccontextmanager
    async def connected(self, client: Client | None = None, port: int = 0) -> AsyncIterator[Client]:
        """Hold a client with the credentials of a relay, by another ``port`` if one is named."""
        client = client or Client()
        seed, host = self.credentials.read_text("ascii").strip(), self.address.host
        await client.connect(
            f"nats://{host}:{port or self.address.port}",
            nkeys_seed_str=seed,
            inbox_prefix=f"edge.{FLEET}.inbox",
            allow_reconnect=False,
        )
        try:
            yield client
        finally:
            await client.close()

    @asynccontextmanager
    async def administered(self) -> AsyncIterator[Client]:
        """Hold a client with the credentials of the administrator."""
        config = replace(self.config, credentials=self.administrator)
        async with administering(config.servers, read_credentials(config)) as client:
            yield client

    def stop(self) -> None:
        if self._process is not None:
            self._process.terminate()
            self._process.wait(BOUND_S)
            self._process = None

    def kill(self) -> None:
        """End it without a chance to write anything."""
        assert self._process is not None
        self._process.kill()
        self._process.wait(BOUND_S)
        self._process = None

    def suspend(self) -> None:
        """Let it neither read nor write, with its connections open."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def lose_all(self) -> None:
        """Delete what it keeps, while it is stopped."""
        shutil.rmtree(self._directory / "store")


def in_thread(work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run ``work`` on a loop of its own: this thread may have one that runs."""
    with ThreadPoolExecutor(1) as pool:
        pool.submit(lambda: asyncio.run(work())).result()


def new_user(file: Path) -> User:
    """Write the seed of a new user into ``file``; return what a server calls it."""
    seed, public_key = new_nkey(os.urandom)
    write_atomic(file, seed + "\n", PRIVATE)
    return {"nkey": public_key}


class TlsNatsServer(NatsServer):
    """The same as `relay cluster init` makes it, with certificates for itself and for ``relay-1``."""

    @classmethod
    @contextmanager
    def trusting(cls, directory: Path, root_pem: str, others: str = "") -> Iterator[Self]:
        """Hold one that accepts connections, also by certificates from another root."""
        server = cls(directory, others)
        roots = server.directory / "relays-root.pem"
        write_atomic(roots, roots.read_text("ascii") + root_pem)
        server.start()
        try:
            yield server
        finally:
            server.stop()

    def __init__(self, directory: Path, others: str = "", users: Sequence[Mapping[str, object]] = ()) -> None:
        super().__init__(directory, others, users)
        made = directory / "cluster"
        setup = set_up(made, [str(self.address)], ["relay-1"], FLEET)
        self.directory = directory_of(made, setup.addresses[0])
        self.root = made / "relays" / "relay-1" / "cluster-root.pem"
        self.credentials = made / "relays" / "relay-1" / "cluster.pem"
        self.administrator = made / "administrator.pem"

    def write_config(self) -> Path:
        config = self.directory / "nats-server.conf"
        if self.others not in (text := config.read_text("utf-8")):
            config.write_text(text + self.others, "utf-8")
        return config

    def credentials_of(self, name: str, ca: SimulatedCa, now_ms: int) -> Path:
        """Return the file with the certificate and the key of a client."""
        key = key_named(name)
        certificate = issue_client(
            ca.root_pem,
            ca.key,
            name=name,
            uri=f"urn:edge-kubelet:{name}",
            public_key=bytes(key.verify_key),
            now_ms=now_ms,
            valid_days=90,
            serial=len(name),
        )
        file = self.directory / f"{name}.pem"
        write_atomic(file, certificate + private_key_to_pem(key), PRIVATE)
        return file

    @property
    def config(self) -> ClusterConfig:
        server = ClusterServer(self.address.host, self.address.port, tls=True)
        return ClusterConfig((server,), self.credentials, self.root, FLEET, ACCOUNT)


# --- Three nats-servers that are one cluster, for the relays of a test's fleet, each in a process of its own.


SERVERS = 3
# A server tells its address to others, which then connect past what stands in front of it: nothing is there.
NOWHERE = HostPort("127.0.0.1", 1)


class ClusteredServer(NatsServer):
    """One of them; ``like`` is the one whose relays are known here too, if it is not the first."""

    copies = SERVERS

    def __init__(self, directory: Path, route: HostPort, like: "ClusteredServer | None" = None) -> None:
        directory.mkdir()
        super().__init__(directory)
        self.route = route
        self.routes: Sequence[HostPort] = ()
        if like is not None:
            self.credentials, self.administrator, self.users = (
                like.credentials,
                like.administrator,
                like.users,
            )

    def part(self) -> None:
        """Have it neither find the others nor be found by them, when it is started again."""
        self.route, nowhere = (HostPort("127.0.0.1", unused_port()) for _ in range(2))
        self.routes = [nowhere]

    def config_text(self) -> str:
        name, store = self.directory.name, str(self.directory / "store")
        routes = Routes("edge", self.route, self.routes, NOWHERE)
        return server_text(name, self.address, ACCOUNT, store=store, tls=False, routes=routes)


class NatsCluster:
    """The servers, with their files below ``directory``."""

    def __init__(self, directory: Path) -> None:
        self.servers: list[ClusteredServer] = []
        for number in range(SERVERS):
            first = self.servers[0] if self.servers else None
            route = HostPort("127.0.0.1", unused_port())
            self.servers.append(ClusteredServer(directory / f"nats-{number}", route, first))
        for server in self.servers:
            server.routes = [other.route for other in self.servers if other is not server]

    @property
    def config(self) -> ClusterConfig:
        first, *others = (server.config for server in self.servers)
        return replace(first, servers=(*first.servers, *(one for other in others for one in other.servers)))

    def start(self, count: int = SERVERS) -> None:
        """Start the first ``count``, and return when they accept connections; all have what relays need."""
        for server in self.servers[:count]:
            server.start_empty()
        if count == SERVERS:
            self.servers[0].make_streams()

    def stop(self) -> None:
        for server in self.servers:
            server.stop()


# --- A proxy in front of a nats-server that holds a client's UNSUB, and all that the client sends after it.


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
