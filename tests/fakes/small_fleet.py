"""A relay for which no broker was set up, and nodes that enrol with it, by the commands that users type."""

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2
import psutil
from mcp.client.client import Client
from mcp.client.streamable_http import streamable_http_client

from relay.cli.demo.local_system import until_listed
from relay.cli.demo.processes import Processes
from relay.settings.config import StateFiles
from schemas.addresses import BrokerAddress, mcp_url
from schemas.files import PRIVATE, write_atomic
from schemas.identity_files import IdentityFiles
from schemas.tls import client_context
from tests.fakes.metrics_client import metrics_client
from tests.fakes.ports import unused_port
from tests.fakes.tls_broker import Peer, until

BOUND_S = 60


@dataclass
class SmallFleet:
    """A relay with its state, and its nodes, in ``directory``.

    Attributes:
        options: what `relay run` is given besides where it serves.
        secure: whether it serves over TLS, and its broker listens so.
        host: of its public URL, which is of this machine.
        tenant: that of the nodes, and of the agents that call them; empty: the usual one.
        public_url: that of another relay of its fleet, where people and agents come to that one.
    """

    directory: Path
    processes: Processes
    options: tuple[str, ...] = ()
    secure: bool = False
    host: str = "127.0.0.1"
    port: int = field(default_factory=unused_port)
    broker_port: int = field(default_factory=unused_port)
    public_url: str = ""
    tenant: str = ""

    @property
    def state(self) -> StateFiles:
        """The state directory of the relay."""
        return StateFiles(self.directory / "relay")

    @property
    def metrics(self) -> Path:
        """Where the relay serves its metrics."""
        return self.state.root / "metrics.sock"

    @property
    def url(self) -> str:
        return self.public_url or f"{'https' if self.secure else 'http'}://{self.host}:{self.port}"

    @property
    def broker(self) -> BrokerAddress:
        """The relay's own broker, as it was kept."""
        return BrokerAddress("127.0.0.1", self.broker_port, tls=self.secure)

    @property
    def broker_pid(self) -> int:
        """The process of the relay's own broker."""
        return int((self.state.broker / "nats-server.process").read_text("ascii").split()[0])

    @property
    def kept(self) -> dict[str, str]:
        """What the relay has kept of its settings."""
        kept: dict[str, str] = json.loads(self.state.settings.read_text("ascii"))
        return kept

    def run_command(self, *options: str) -> list[str]:
        """Return the command that runs the relay with ``options``."""
        serving = ["--listen", f"127.0.0.1:{self.port}", "--public-url", self.url]
        serving += ["--metrics-listen", str(self.metrics)]
        tls = ["--tls-own"] if self.secure else []
        return [*_python("relay"), "run", *serving, *tls, "--state-dir", str(self.state.root), *options]

    @property
    def listening(self) -> tuple[str, ...]:
        """The option by which a broker of a test does not take the usual port."""
        return ("--broker-listen", str(self.broker))

    @property
    def _of_tenant(self) -> tuple[str, ...]:
        return ("--tenant", self.tenant) if self.tenant else ()

    async def start_relay(self, *options: str) -> None:
        """Start the relay, and return when it serves."""
        await self.processes.start("relay", self.run_command(*(options or self.options)))
        await self.processes.until_listening(self.port)

    async def relay(self, *arguments: str) -> str:
        """Run a command of the relay, and return what it printed."""
        command = [*_python("relay"), *arguments, "--state-dir", str(self.state.root)]
        return await self.processes.output(command)

    async def enrol(self, name: str) -> dict[str, Any]:
        """Enrol the node called ``name``, and return what it was told."""
        token = self.directory / f"{name}.token"
        write_atomic(token, await self.relay("join-token", "create", *self._of_tenant), PRIVATE)
        options = ["--token-file", str(token), "--state-dir", str(self.directory / name), "--json"]
        facts: dict[str, Any] = json.loads(
            await self.processes.output([*_python("kubelet"), "enroll", self.url, *options])
        )
        return facts

    async def start_node(self, name: str) -> None:
        """Start the daemon of the node called ``name``, which knows what it was told at its enrolment."""
        state = ["--state-dir", str(self.directory / name), "--loopback-port", "0"]
        await self.processes.start(name, [*_python("kubelet"), "run", *state])

    def identity(self, name: str) -> IdentityFiles:
        """Return the files of the node called ``name``."""
        return IdentityFiles(self.directory / name)

    def peer(self, name: str | None, **options: Any) -> Peer:
        """Connect to the relay's own broker as that node, or without a certificate."""
        shown = None if name is None else (self.identity(name).leaf, self.identity(name).key)
        return Peer(self.broker, client_context(self.roots(), shown), **options)

    def admitted(self, name: str) -> Peer:
        """Return that node's connection as soon as the broker has read that it was enrolled."""
        return until(lambda: self.peer(name), lambda peer: peer.connected)

    async def ready(self) -> Mapping[str, Any]:
        """Return what ``/readyz`` shows."""
        async with self._http() as http:
            page: dict[str, Any] = (await http.get(f"{self.url}/readyz")).json()
        return page

    async def until_ready(self) -> Mapping[str, bool]:
        """Return the subsystems once the relay is ready."""
        async with asyncio.timeout(BOUND_S):
            while not (page := await self.ready())["ready"]:
                self.processes.check()
        return {name: health["ready"] for name, health in page["subsystems"].items()}

    async def metric(self, name: str) -> float:
        """Return a figure of ``/metrics``."""
        async with metrics_client(self.metrics) as http:
            lines = (await http.get("/metrics")).text.splitlines()
        return next(float(line.split()[1]) for line in lines if line.startswith(f"{name} "))

    @asynccontextmanager
    async def agent(self) -> AsyncIterator[Client]:
        """Hold an official MCP client, which believes the relay by its root alone."""
        issued = await self.relay("token", "issue", "--sub", "agent", *self._of_tenant)
        async with self._http({"Authorization": f"Bearer {issued.strip()}"}) as http:
            transport = streamable_http_client(mcp_url(self.url), http_client=http)
            async with Client(transport) as client:
                yield client

    async def echo(self, node_id: str, message: str) -> object:
        """Call the node's echo as an agent as soon as it is connected and listed, and return what comes."""
        async with asyncio.timeout(BOUND_S), self.agent() as client:
            await until_listed(client, {node_id}, self.processes.check)
            answer = await client.call_tool(f"sysecho.{node_id}.echo.invoke", {"message": message})
        assert not answer.is_error, answer
        return (answer.structured_content or {})["message"]

    def log(self, event: str, of: str = "relay") -> list[dict[str, Any]]:
        lines = self.processes.log(of).read_text("utf-8").splitlines()
        entries = [json.loads(line) for line in lines if line.startswith("{")]
        return [entry for entry in entries if entry.get("event") == event]

    def said(self) -> list[str]:
        """Return the lines of the relay that are for the one who has started it."""
        lines = self.processes.log("relay").read_text("utf-8").splitlines()
        return [line for line in lines if not line.startswith("{")]

    def roots(self) -> str:
        """Return the root of the relay's certificate."""
        return (self.state.ca / "server-root.pem").read_text("ascii")

    @asynccontextmanager
    async def _http(self, headers: Mapping[str, str] | None = None) -> AsyncIterator[httpx2.AsyncClient]:
        verify = client_context(self.roots()) if self.secure else True
        async with httpx2.AsyncClient(headers=headers, verify=verify, trust_env=False) as http:
            yield http


@asynccontextmanager
async def small_fleet(
    directory: Path, *, secure: bool = False, host: str = "127.0.0.1"
) -> AsyncIterator[SmallFleet]:
    """Hold a fleet whose relay has a CA, and does not run yet."""
    async with Processes.running(directory) as processes:
        fleet = SmallFleet(directory, processes, secure=secure, host=host)
        await fleet.relay("ca", "init")
        yield fleet


def is_running(pid: int) -> bool:
    """Return whether that process runs; one that ended and was not waited for does not."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _python(package: str) -> list[str]:
    return [sys.executable, "-P", "-m", package]
