"""A broker, a relay and nodes in processes of their own, connected by proxies that make faults.

The relay serves over TLS; its public URL is that of the proxy to which the nodes connect. Must not choose
faults.
"""

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from kubelet.config import default_socket
from relay.config import StateFiles
from relay.demo.local_system import start_broker
from relay.demo.plan import Plan
from relay.demo.processes import Processes
from schemas.addresses import BrokerAddress
from schemas.files import PRIVATE, write_atomic
from schemas.identity_files import IdentityFiles
from tests.chaos.history import RELAY_WAITS_S, Disturbance
from tests.chaos.schedule import End, Fault, Link, Program
from tests.fakes.fault_proxy import FaultProxy, LinkFault
from tests.fakes.ports import unused_port

_START_S = 60.0


def now_ms() -> int:
    """Return the time as every journal has it."""
    return time.time_ns() // 1_000_000


class Site:
    """The parts of one run, in ``directory``.

    Attributes:
        nodes: the id of each node.
        disturbances: what was done to links and processes so far.
    """

    def __init__(
        self, directory: Path, processes: Processes, plan: Plan, proxies: dict[Link, FaultProxy]
    ) -> None:
        self.directory = directory
        self.processes = processes
        self.plan = plan
        self.nodes: dict[Program, str] = {}
        self.disturbances: list[Disturbance] = []
        self._proxies = proxies

    @classmethod
    @asynccontextmanager
    async def running(cls, directory: Path, nodes: Sequence[Program]) -> AsyncIterator["Site"]:
        """Hold the parts, which all run; ``nodes`` are enrolled."""
        listen, broker = unused_port(), unused_port()
        plan = Plan(directory, StateFiles(directory / "relay"), listen, 0, broker)
        targets = {
            Link.AGENT_RELAY: listen,
            Link.NODE_RELAY: listen,
            Link.NODE_BROKER: broker,
            Link.RELAY_BROKER: broker,
        }
        async with AsyncExitStack() as stack:
            proxies = {
                link: await stack.enter_async_context(FaultProxy(BrokerAddress("127.0.0.1", port)).running())
                for link, port in targets.items()
            }
            processes = await stack.enter_async_context(Processes.running(directory))
            site = cls(directory, processes, plan, proxies)
            await site._start_all(nodes)
            yield site
            site.disturbances.append(Disturbance(Program.RELAY, now_ms(), now_ms()))

    @property
    def public_url(self) -> str:
        """What nodes pin, and agents' tokens are for."""
        return f"https://{self._proxies[Link.NODE_RELAY].address.host}:{self._port(Link.NODE_RELAY)}"

    @property
    def agent_url(self) -> str:
        """Where agents connect."""
        return f"https://127.0.0.1:{self._port(Link.AGENT_RELAY)}"

    @property
    def relay_url(self) -> str:
        """The relay itself, which no fault can be in front of."""
        return f"https://127.0.0.1:{self.plan.relay_port}"

    @property
    def roots(self) -> str:
        """The roots of the certificate that the relay serves with."""
        return "".join(file.read_text("ascii") for file in sorted(self.plan.state.ca.glob("*.pem")))

    async def token(self, sub: str, *scopes: str) -> str:
        """Return a token for the agent ``sub``; without ``scopes`` for reading only."""
        named = [option for scope in scopes for option in ("--scope", scope)]
        issued = await self._relay("token", "issue", "--sub", sub, "--public-url", self.public_url, *named)
        return issued.strip()

    def socket(self, node: Program) -> Path:
        """Return the socket of a node's local agents."""
        return default_socket(self.state(node))

    async def make(self, fault: Fault) -> None:
        """Have ``fault`` happen, and return when it is over, and a process has been started again."""
        began_ms = now_ms()
        if isinstance(fault.target, Link) and isinstance(fault.kind, LinkFault):
            proxy = self._proxies[fault.target]
            begun = proxy.begin(fault.kind, fault.which)
            await asyncio.sleep(fault.for_s)
            proxy.end(begun)
        elif isinstance(fault.target, Program):
            end = self.processes.kill if fault.kind is End.SIGKILL else self.processes.stop
            await end(fault.target)
            await asyncio.sleep(fault.for_s)
            async with asyncio.timeout(_START_S):
                await self._start(fault.target)
        self.disturbances.append(Disturbance(fault.target, began_ms, now_ms()))

    def state(self, program: Program) -> Path:
        """Return the state directory of the relay or of a node."""
        return self.plan.state.root if program is Program.RELAY else self.directory / f"{program}.state"

    def log(self, program: Program) -> Path:
        """Return the log of a process."""
        return self.processes.log(program)

    async def _start_all(self, nodes: Sequence[Program]) -> None:
        async with asyncio.timeout(_START_S):
            await self._relay("ca", "init")
            await self._start(Program.BROKER)
            await self._start(Program.RELAY)
            token = await self._join_token(len(nodes))
            await asyncio.gather(*(self._enrol(node, token) for node in nodes))
            for node in nodes:
                await self._start(node)

    async def _start(self, program: Program) -> None:
        match program:
            case Program.BROKER:
                await start_broker(self.plan, self.processes)
            case Program.RELAY:
                await self.processes.start(program, self._relay_command())
                await self.processes.until_listening(self.plan.relay_port)
            case _:
                broker = self._proxies[Link.NODE_BROKER].address
                options = ["--loopback-port", "0", "--broker", str(broker)]
                command = _python("kubelet", "run", "--state-dir", self.state(program), *options)
                await self.processes.start(program, command)

    def _relay_command(self) -> list[str]:
        return _python(
            "relay",
            "run",
            *("--listen", f"127.0.0.1:{self.plan.relay_port}", "--public-url", self.public_url, "--tls-own"),
            *("--broker", str(self._proxies[Link.RELAY_BROKER].address)),
            *("--caller-timeout", f"{RELAY_WAITS_S:g}s"),
            *("--state-dir", self.plan.state.root),
        )

    async def _join_token(self, uses: int) -> Path:
        options = ("--public-url", self.public_url, "--uses", str(uses))
        token = self.directory / "join.token"
        write_atomic(token, await self._relay("join-token", "create", *options), PRIVATE)
        return token

    async def _enrol(self, node: Program, token: Path) -> None:
        state = self.state(node)
        command = _python("kubelet", "enroll", self.public_url, "--token-file", token, "--state-dir", state)
        await self.processes.output(command)
        self.nodes[node] = IdentityFiles(state).read().node_id

    async def _relay(self, *arguments: str) -> str:
        command = _python("relay", *arguments, "--state-dir", self.plan.state.root)
        return await self.processes.output(command)

    def _port(self, link: Link) -> int:
        return self._proxies[link].address.port


def _python(package: str, *arguments: str | Path) -> list[str]:
    return [sys.executable, "-P", "-m", package, *map(str, arguments)]
