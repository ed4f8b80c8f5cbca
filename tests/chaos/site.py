"""A broker, relays and nodes in processes of their own, connected by proxies that make faults.

The relays serve over TLS; their public URL is that of the proxy by which nodes connect to the first. Several
are joined by nats-servers, and nodes know each of them. Must not choose faults.
"""

import asyncio
import os
import random
import shutil
import sys
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path

from kubelet.config import default_socket
from kubelet.identity.provisioning import create_identity
from kubelet.session.relay_addresses import RelayAddresses
from relay.cli.demo.local_system import Plan, start_broker
from relay.cli.demo.processes import Processes
from relay.settings.config import StateFiles
from schemas.files import PRIVATE, make_private_directory, write_atomic
from schemas.identity_files import IdentityFiles
from schemas.process.status_socket import NotRunningError, StalledError, read_status
from tests.chaos import once_kind
from tests.chaos.history import RELAY_WAITS_S, Disturbance
from tests.chaos.proxies import Proxies
from tests.chaos.schedule import Fault
from tests.chaos.servers import Servers
from tests.chaos.topology import End, Link, Program, RelayParts, StayingNodes, Topology
from tests.fakes.fault_proxy import LinkFault
from tests.fakes.polling import before_asking_again
from tests.fakes.ports import unused_port

_START_S = 90.0


def now_ms() -> int:
    """Return the time as every journal has it."""
    return time.time_ns() // 1_000_000


class Site:
    """The parts of one run, in ``directory``.

    Attributes:
        plans: where each relay is.
        proxies: what is in front of each part.
        nodes: the id of each node.
        prefixes: what the command of a program is prefixed with: a program that starts another.
        disturbances: what was done to links and processes so far.
    """

    def __init__(self, directory: Path, topology: Topology, processes: Processes, proxies: Proxies) -> None:
        self.directory = directory
        self.topology = topology
        self.processes = processes
        self.proxies = proxies
        self.plans: Mapping[Program, Plan] = {
            relay.program: _plan(directory, relay.program, proxies) for relay in topology.relays
        }
        self.nodes: dict[Program, str] = {}
        self.prefixes: dict[Program, Sequence[str]] = {}
        self.disturbances: list[Disturbance] = []
        self._servers = Servers(directory, topology.servers, proxies)

    @classmethod
    @asynccontextmanager
    async def stopped(cls, directory: Path, topology: Topology) -> AsyncIterator["Site"]:
        """Hold the parts, of which none runs but the proxies."""
        async with AsyncExitStack() as stack:
            proxies = await stack.enter_async_context(Proxies.running(topology))
            processes = await stack.enter_async_context(Processes.running(directory))
            yield cls(directory, topology, processes, proxies)

    @classmethod
    @asynccontextmanager
    async def running(cls, directory: Path, topology: Topology) -> AsyncIterator["Site"]:
        """Hold the parts, which all run; the nodes are enrolled."""
        async with cls.stopped(directory, topology) as site:
            await site.start_all()
            yield site
            ended_ms = now_ms()
            site.disturbances += [Disturbance(program, ended_ms, ended_ms) for program in site.plans]

    @property
    def plan(self) -> Plan:
        """Where the first relay is."""
        return self.plans[Program.RELAY]

    @property
    def public_url(self) -> str:
        """What nodes pin, and agents' tokens are for."""
        return self.node_url(self.topology.relays[0])

    def agent_url(self, relay: RelayParts) -> str:
        """Return where agents of a relay connect."""
        return self._url(relay.agents)

    def node_url(self, relay: RelayParts) -> str:
        """Return where nodes connect to a relay."""
        return self._url(relay.nodes)

    def relay_url(self, program: Program) -> str:
        """Return a relay itself, which no fault can be in front of."""
        return f"https://127.0.0.1:{self.plans[program].relay_port}"

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds that nodes have besides those that ship."""
        return (once_kind.KIND,) if self.topology.servers else ()

    @property
    def packages(self) -> Path:
        """The directory of packages with the packages of these kinds."""
        return self.directory / "packages"

    @property
    def roots(self) -> str:
        """The roots of the certificates that the relays serve with."""
        return "".join(file.read_text("ascii") for file in sorted(self.plan.state.ca.glob("*.pem")))

    def staying(self) -> list[str]:
        """Return the ids of the nodes that stay at their relay."""
        return [self.nodes[node] for node in self._stay]

    async def token(self, sub: str, *scopes: str) -> str:
        """Return a token for the agent ``sub``; without ``scopes`` for reading only."""
        named = [option for scope in scopes for option in ("--scope", scope)]
        issue = ("token", "issue", "--sub", sub, "--public-url", self.public_url)
        return (await self.command(Program.RELAY, *issue, *named)).strip()

    async def command(self, relay: Program, *arguments: str | Path) -> str:
        """Run a command on the machine of ``relay``, and return what it printed.

        Raises:
            StartError: it failed.
        """
        state = ("--state-dir", self.plans[relay].state.root)
        return await self.processes.output(self._python(relay, "relay", *arguments, *state))

    def socket(self, node: Program) -> Path:
        """Return the socket of a node's local agents."""
        return default_socket(self.state(node))

    def state(self, program: Program) -> Path:
        """Return the state directory of a relay or of a node."""
        plan = self.plans.get(program)
        return plan.state.root if plan is not None else self.directory / f"{program}.state"

    def log(self, program: Program) -> Path:
        return self.processes.log(program)

    async def make(self, fault: Fault) -> None:
        """Have ``fault`` happen, and return when it is over, and a process has been started again."""
        began_ms = now_ms()
        if isinstance(fault.target, Link) and isinstance(fault.kind, LinkFault):
            async with self.proxies.disturbed(fault.target, fault.kind, fault.which):
                await asyncio.sleep(fault.for_s)
        elif isinstance(fault.target, Program):
            end = self.processes.kill if fault.kind is End.SIGKILL else self.processes.stop
            await end(fault.target)
            await asyncio.sleep(fault.for_s)
            async with asyncio.timeout(_START_S):
                await self.start(fault.target)
        self.disturbances.append(Disturbance(fault.target, began_ms, now_ms(), fault.kind))

    async def start_all(self) -> None:
        """Start every part, and return when the relays listen, and the nodes are enrolled."""
        first, *others = self.topology.relays
        if self.kinds:
            once_kind.install(self.packages)
        async with asyncio.timeout(_START_S):
            await self.command(first.program, "ca", "init")
            await self.start(Program.BROKER)
            for server in self.topology.servers:
                await self.start(server)
            await self._servers.make_streams()
            await self.start(first.program)
            token = await self._join_token(len(self.topology.nodes))
            await asyncio.gather(*(self._enrol(node, token) for node in self.topology.nodes))
            await self.token("agent")  # the key of tokens is made, which the relays have in common
            for relay in others:
                state = self.plans[relay.program].state
                shutil.copytree(self.plan.state.ca, state.ca)
                shutil.copy2(self.plan.state.token_key, state.token_key)
                await self.start(relay.program)
            if self.topology.staying is not None:
                await self._start_staying(self.topology.staying)
            for node in self.topology.nodes:
                if node not in self._stay:
                    await self.start(node)

    async def start(self, program: Program) -> None:
        """Start a process, and return when it listens; a node does not."""
        if program is Program.BROKER:
            await start_broker(self.plan, self.processes)
        elif program in self.topology.servers:
            await self._servers.start(program, self.processes)
        elif program in self.plans:
            await self.processes.start(program, self.relay_command(program, "run"))
            await self.processes.until_listening(self.plans[program].relay_port)
        else:
            await self.processes.start(program, self._node_command(program))

    def relay_command(self, program: Program, *command: str) -> list[str]:
        """Return a command of a relay that takes its settings."""
        plan = self.plans[program]
        return self._python(
            program,
            "relay",
            *command,
            *("--listen", f"127.0.0.1:{plan.relay_port}", "--public-url", self.public_url, "--tls-own"),
            *("--broker", str(self.proxies.address(Link.RELAY_BROKER))),
            *("--caller-timeout", f"{RELAY_WAITS_S:g}s"),
            *("--state-dir", plan.state.root),
            *self._servers.options(program, self.topology),
            *self._kinds,
        )

    async def _start_staying(self, staying: StayingNodes) -> None:
        """Start the nodes that stay, and return when they are connected by their own link.

        The public URL is the first address of every node, so they try it too: it is cut meanwhile.
        """
        url = self._url(staying.link)
        async with self.proxies.disturbed(self.topology.relays[0].nodes, LinkFault.CUT):
            for node in staying.programs:
                await self.start(node)
            while {self.connected_to(node) for node in staying.programs} != {url}:
                await before_asking_again()

    def connected_to(self, node: Program) -> str | None:
        """Return the relay that a node says it is connected to."""
        try:
            url: str | None = read_status(self.state(node))["relay"]["connected_to"]
        except (NotRunningError, StalledError):
            return None
        return url

    def _node_command(self, program: Program) -> list[str]:
        options = ["--loopback-port", "0", "--broker", str(self.proxies.address(Link.NODE_BROKER))]
        relays = [option for url in self._other_urls(program) for option in ("--relay", url)]
        several = ("--relay", self.public_url, *relays) if relays else ()
        state = self.state(program)
        return self._python(program, "kubelet", "run", "--state-dir", state, *options, *several, *self._kinds)

    @property
    def _stay(self) -> tuple[Program, ...]:
        return self.topology.staying.programs if self.topology.staying is not None else ()

    def _other_urls(self, node: Program) -> list[str]:
        """Return where a node connects besides the public URL."""
        if self.topology.staying is not None and node in self._stay:
            return [self._url(self.topology.staying.link)]
        return [self.node_url(relay) for relay in self.topology.relays[1:]]

    @property
    def _kinds(self) -> tuple[str, ...]:
        return ("--kinds", ",".join(self.kinds)) if self.kinds else ()

    async def _join_token(self, uses: int) -> Path:
        options = ("--public-url", self.public_url, "--uses", str(uses))
        token = self.directory / "join.token"
        write_atomic(token, await self.command(Program.RELAY, "join-token", "create", *options), PRIVATE)
        return token

    async def _mint(self, node: Program) -> None:
        """Give a node an identity that tries the relay of its number first, so that nodes begin at several.

        To move them would not do: after it, calls under new keys are unknown for ten minutes.
        """
        files = IdentityFiles(self.state(node))
        urls = [self.public_url, *self._other_urls(node)]
        wanted, rng = urls[self.topology.nodes.index(node) % len(urls)], random.Random(0)  # noqa: S311 - of waits
        while True:
            make_private_directory(files.root)
            node_id = create_identity(files, now_ms(), os.urandom)
            first, _ = await RelayAddresses(urls, node_id, rng, time.monotonic).next()
            if first.url == wanted:
                return
            shutil.rmtree(files.root)

    async def _enrol(self, node: Program, token: Path) -> None:
        await self._mint(node)
        state = self.state(node)
        command = self._python(
            node, "kubelet", "enroll", self.public_url, "--token-file", token, "--state-dir", state
        )
        await self.processes.output(command)
        self.nodes[node] = IdentityFiles(state).read().node_id

    def _url(self, link: Link) -> str:
        return f"https://127.0.0.1:{self.proxies.address(link).port}"

    def _python(self, program: Program, package: str, *arguments: str | Path) -> list[str]:
        # Besides what this process was given: its modules may be those of another directory.
        path = os.pathsep.join(filter(None, (str(self.packages), os.environ.get("PYTHONPATH"))))
        packages = ("env", f"PYTHONPATH={path}") if self.kinds else ()
        return [*self.prefixes.get(program, ()), *packages, *_command(package, *arguments)]


def _plan(directory: Path, program: Program, proxies: Proxies) -> Plan:
    state = StateFiles(directory / program)
    plan = Plan(directory, state, proxies.target_port(program), 0, proxies.target_port(Program.BROKER))
    if program is not Program.RELAY:
        state.root.mkdir(mode=0o700)
    return replace(plan, loopback_port=unused_port())


def _command(package: str, *arguments: str | Path) -> list[str]:
    return [sys.executable, "-P", "-m", package, *map(str, arguments)]
