"""A whole system on this machine: broker, CA, relay, this machine's kubelet, and mock nodes.

The demo, tests and benches run it. Every part is the real one, in a process of its own, started by the
commands that a user would type, with all files in one directory. ``Plan`` says where each is. Must not do
what a user could not do.
"""

import asyncio
import json
import os
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx2
from mcp.client.client import Client
from mcp.client.streamable_http import streamable_http_client
from mcp_types import TextResourceContents, Tool

from relay.auth.agent_tokens import TokenIssuer
from relay.auth.permissions import SCOPE_OF_SAFETY_CLASS
from relay.broker.nats_server import find_nats_server, nats_config
from relay.cli.demo.processes import ClaimedPorts, Processes
from relay.pki.authority import CertificateAuthority
from relay.settings.config import StateFiles
from relay.settings.environment import now_ms
from relay.state.key_files import load_or_create_key
from relay.state.tokens import IssuedToken, IssuedTokens
from schemas.addresses import HostPort, mcp_url
from schemas.projection import parse
from schemas.registry import SchemaRegistry
from schemas.ulids import UlidSource

_RELAY_PORT = 8700
_LOOPBACK_PORT = 8701
_BROKER_PORT = 1883


@dataclass(frozen=True, slots=True)
class Plan:
    """Where everything is.

    Attributes:
        relay_options: what the relay's command has besides; of an option given twice the last counts.
        kinds: the kinds of installed packages that the relay and this machine's kubelet are given.
        fleet_url: the public URL that several relays have in common; None of one alone. Nothing listens
            there: each node is given its relay's own URL besides, and so is behind that relay.
    """

    directory: Path
    state: StateFiles
    relay_port: int
    loopback_port: int
    broker_port: int
    relay_options: tuple[str, ...] = ()
    kinds: tuple[str, ...] = ()
    fleet_url: str | None = None

    @classmethod
    def below(cls, directory: Path, ports: ClaimedPorts, kinds: tuple[str, ...] = ()) -> "Plan":
        """Return a plan for ``directory``, with the usual ports where they are free."""
        return cls(
            directory=directory,
            state=StateFiles(directory / "relay"),
            relay_port=ports.take(_RELAY_PORT),
            loopback_port=ports.take(_LOOPBACK_PORT),
            broker_port=ports.take(_BROKER_PORT),
            kinds=kinds,
        )

    def moved(self) -> Iterator[str]:
        """Yield a line for each part whose usual port is in use."""
        chosen = {
            "relay": (_RELAY_PORT, self.relay_port),
            "kubelet": (_LOOPBACK_PORT, self.loopback_port),
            "broker": (_BROKER_PORT, self.broker_port),
        }
        for part, (usual, port) in chosen.items():
            if port != usual:
                yield f"port {usual} is in use on 127.0.0.1: the {part} takes {port}"

    @property
    def kubelet_state(self) -> Path:
        """The state directory of this machine's kubelet."""
        return self.directory / "kubelet"

    @property
    def socket(self) -> Path:
        """Where local agents connect to this machine's kubelet; not made where its path would be too long."""
        return self.kubelet_state / "relay.sock"

    @property
    def mocks(self) -> Path:
        """The directory of the mock nodes' identities."""
        return self.directory / "mocks"

    @property
    def url(self) -> str:
        """Where the relay is reached."""
        return f"http://127.0.0.1:{self.relay_port}"

    @property
    def public_url(self) -> str:
        """The relay's public URL, which nodes sign for and tokens are for."""
        return self.fleet_url or self.url

    @property
    def node_relays(self) -> tuple[str, ...]:
        """What nodes are given as ``--relay``, each."""
        return tuple(dict.fromkeys((self.public_url, self.url)))

    @property
    def broker(self) -> str:
        """The broker's ``HOST:PORT``."""
        return f"127.0.0.1:{self.broker_port}"


TENANT = "demo"
READ_ONLY = (SCOPE_OF_SAFETY_CLASS["read_only"],)

_TOKEN_TTL_S = 12 * 3600
_POLL_S = 0.1
# As the MCP SDK's own clients: a stream without messages is not broken.
_TIMEOUT = httpx2.Timeout(30, read=300)

OnStep = Callable[[str], None]
"""Called with a line for each step that is done."""


@dataclass(frozen=True, slots=True)
class LocalSystem:
    """A system that was started, and how to connect to it."""

    plan: Plan
    processes: Processes
    token: str
    real_node: str
    mock_nodes: list[str]

    @asynccontextmanager
    async def client(self, mode: str = "auto") -> AsyncIterator[Client]:
        """Hold an official MCP client; ``mode`` is as ``mcp.client.Client`` has it."""
        headers = {"Authorization": f"Bearer {self.token}"}
        # No proxy: it would get the token, and cannot reach this machine's loopback.
        async with httpx2.AsyncClient(headers=headers, timeout=_TIMEOUT, trust_env=False) as http:
            transport = streamable_http_client(mcp_url(self.plan.url), http_client=http)
            async with Client(transport, mode=mode) as client:
                yield client

    async def until_listed(self) -> list[Tool]:
        """Wait until every node is connected and listed, since calls could only fail; return the tools.

        Raises:
            StartError: a process ended first.
        """
        async with self.client() as client:
            wanted = {self.real_node, *self.mock_nodes}
            return await until_listed(client, wanted, self.processes.check)


async def start_system(plan: Plan, nodes: int, processes: Processes, step: OnStep) -> LocalSystem:
    """Start a system with ``nodes`` mock nodes beside this machine's own.

    Raises:
        StartError: a process could not be started.
    """
    await start_broker(plan, processes)
    step(f"broker      nats-server, MQTT on {plan.broker}")
    return await start_beside_broker(plan, nodes, processes, step)


async def start_beside_broker(plan: Plan, nodes: int, processes: Processes, step: OnStep) -> LocalSystem:
    """Start the same with the broker that listens on the plan's port.

    Raises:
        StartError: a process could not be started.
    """
    ca = CertificateAuthority(plan.state.ca, now_ms, os.urandom)
    ca.create()
    real_node = await _enrol(plan, ca, processes)
    mock_nodes = ca.issue_mock(nodes, plan.mocks, TENANT) if nodes else []
    step(f"CA          leaf certificates issued: {1 + len(mock_nodes)}")
    await processes.start("relay", relay_command(plan))
    await processes.until_listening(plan.relay_port)
    step(f"relay       {plan.url}")
    await processes.start("kubelet", kubelet_command(plan))
    step(f"kubelet     this machine is node {real_node}")
    if mock_nodes:
        await processes.start("fleet", fleet_command(plan))
        step(f"fleet       {len(mock_nodes)} mock nodes")
    token = issue_token(plan, "demo-agent")
    return LocalSystem(plan, processes, token, real_node, mock_nodes)


async def until_listed(client: Client, wanted: AbstractSet[str], check: Callable[[], None]) -> list[Tool]:
    """Wait until the nodes ``wanted`` are connected and listed; return all tools.

    ``check`` is called before each attempt; what it raises ends the wait.
    """
    while True:
        check()
        started = time.monotonic()
        # The tools of a large fleet are many pages: they are not listed before it is there.
        if wanted <= await connected_nodes(client):
            tools = await list_tools(client)
            if wanted <= {name.node_id for tool in tools if (name := parse(tool.name))}:
                return tools
        # To read thousands of nodes keeps the relay from accepting them.
        await asyncio.sleep(max(_POLL_S, time.monotonic() - started))


async def connected_nodes(client: Client) -> set[str]:
    """Return the nodes that are connected: tools stay listed for a while after a node has disconnected."""
    nodes: set[str] = set()
    uri: str | None = "fleet://nodes"
    while uri is not None:
        contents = (await client.read_resource(uri, cache_mode="bypass")).contents
        page = json.loads("".join(item.text for item in contents if isinstance(item, TextResourceContents)))
        nodes |= {node["node_id"] for node in page["nodes"] if node["connected"]}
        uri = f"fleet://nodes?cursor={page['nextCursor']}" if "nextCursor" in page else None
    return nodes


async def list_tools(client: Client) -> list[Tool]:
    """Return all pages of ``tools/list``, fresh."""
    tools: list[Tool] = []
    cursor: str | None = None
    while True:
        page = await client.list_tools(cursor=cursor, cache_mode="bypass")
        tools += page.tools
        cursor = page.next_cursor
        if cursor is None:
            return tools


async def start_broker(plan: Plan, processes: Processes) -> None:
    """Start the broker, and wait until it listens.

    Raises:
        ProgramError: there is no nats-server.
        StartError: it has ended.
    """
    config = plan.directory / "broker.conf"
    listen = HostPort("127.0.0.1", plan.broker_port)
    config.write_text(nats_config(listen, plan.directory / "broker", access=None), "utf-8")
    program = await asyncio.to_thread(find_nats_server)
    await processes.start("broker", [str(program), "-c", str(config)])
    await processes.until_listening(plan.broker_port)


async def _enrol(plan: Plan, ca: CertificateAuthority, processes: Processes) -> str:
    """Give this machine an identity, and return its node id."""
    init = [*_python("kubelet"), "init", "--json", "--state-dir", str(plan.kubelet_state)]
    facts = json.loads(await processes.output(init))
    leaf = plan.directory / "leaf.pem"
    _issue(ca, Path(facts["csr"]), leaf)
    await processes.output([*init, "--certificate", str(leaf), "--root", str(ca.root_file)])
    return str(facts["node_id"])


def _issue(ca: CertificateAuthority, csr: Path, leaf: Path) -> None:
    leaf.write_text(ca.issue(csr.read_text("utf-8"), TENANT), "utf-8")


def relay_command(plan: Plan) -> list[str]:
    """Return the command that runs the relay."""
    return [
        *_python("relay"),
        "run",
        *("--broker", plan.broker),
        *("--public-url", plan.public_url),
        *("--listen", f"127.0.0.1:{plan.relay_port}"),
        *("--state-dir", str(plan.state.root)),
        *_kinds(plan),
        *plan.relay_options,
    ]


def kubelet_command(plan: Plan) -> list[str]:
    """Return the command that runs this machine's kubelet."""
    return [
        *_python("kubelet"),
        "run",
        *("--state-dir", str(plan.kubelet_state)),
        *("--loopback-port", str(plan.loopback_port)),
        *_kinds(plan),
        *("--broker", plan.broker),
        *(word for url in plan.node_relays for word in ("--relay", url)),
    ]


def _kinds(plan: Plan) -> tuple[str, ...]:
    return ("--kinds", ",".join(plan.kinds)) if plan.kinds else ()


def fleet_command(plan: Plan) -> list[str]:
    """Return the command that runs the mock nodes."""
    return [
        *_python("kubelet"),
        "fleet",
        *("--identities", str(plan.mocks)),
        *("--broker", plan.broker),
        *(word for url in plan.node_relays for word in ("--relay", url)),
    ]


def issue_token(plan: Plan, sub: str, tenant: str = TENANT, scopes: Sequence[str] = READ_ONLY) -> str:
    """Return a token for the agent ``sub``, valid for the demo's lifetime; by default for reading only."""
    key, now = load_or_create_key(plan.state.token_key, os.urandom), now_ms()
    audience = mcp_url(plan.public_url)
    jti, end = UlidSource(lambda: now, os.urandom).new(), now + _TOKEN_TTL_S * 1000
    issued = IssuedToken(jti, tenant, sub, tuple(scopes), audience, now, end)
    token = TokenIssuer(key, plan.public_url, audience, SchemaRegistry()).issue(
        sub=sub,
        tenant=tenant,
        scopes=list(scopes),
        now_s=now // 1000,
        ttl_s=_TOKEN_TTL_S,
        jti=issued.jti,
    )
    IssuedTokens(plan.state.issued_tokens).add(issued)
    return token


def _python(package: str) -> list[str]:
    # -P: else Python would take modules from the working directory first.
    return [sys.executable, "-P", "-m", package]
