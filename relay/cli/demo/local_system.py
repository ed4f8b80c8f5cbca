"""A whole system on this machine: broker, CA, relay, this machine's kubelet, and mock nodes.

The demo, tests and benches run it. Every part is the real one, in a process of its own, started by the
commands that a user would type, with all files in one directory. ``Plan`` says where each is. Must not do
what a user could not do.
"""

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TypeVar

import httpx2
from mcp.client.client import Client
from mcp.client.streamable_http import streamable_http_client
from mcp.shared.exceptions import MCPError
from mcp_types import TextResourceContents, Tool

from relay.auth.permissions import SCOPE_OF_SAFETY_CLASS
from relay.broker.nats_server import find_nats_server, nats_config
from relay.cli.backup.commands import restore, save_for_another_relay
from relay.cli.demo.processes import ClaimedPorts, Processes, to_its_end
from relay.cli.tokens import signed
from relay.cluster.client import administering
from relay.cluster.credentials import Credentials, new_nkey
from relay.cluster.jetstream import make_streams
from relay.cluster.server_config import User, account_file, account_text, server_text
from relay.pki.authority import CertificateAuthority
from relay.remote_tools import BearerToken, HttpServer, Permissions, RemoteTools
from relay.settings.config import ClusterServer, StateFiles, account_of
from relay.settings.environment import now_ms
from relay.settings.kept import read_kept
from relay.state.key_files import load_or_create_key
from relay.state.tokens import IssuedTokens
from schemas.addresses import KINDS_PATH, MCP_PATH, HostPort, mcp_url
from schemas.errors import Failure
from schemas.files import PRIVATE, fits_socket, make_private_directory, write_atomic
from schemas.pacing import Backoff
from schemas.process.status_socket import read_status
from schemas.projection import parse
from schemas.registry import read_contract

_RELAY_PORT = 8700
_LOOPBACK_PORT = 8701
_BROKER_PORT = 1883
_FILES = "linux.files"


@dataclass(frozen=True, slots=True)
class Plan:
    """Where everything is.

    Attributes:
        relay_options: what the relay's command has besides; of an option given twice the last counts.
        kinds: those that the relay and this machine's kubelet are given besides RFC-0001's.
        fleet_url: the public URL that several relays have in common; None of one alone. Nothing listens
            there: each node is given its relay's own URL besides, and so is behind that relay.
        public_host: of one relay's public URL. Passkeys are made at a name, and at no address.
    """

    directory: Path
    state: StateFiles
    relay_port: int
    loopback_port: int
    broker_port: int
    relay_options: tuple[str, ...] = ()
    kinds: tuple[str, ...] = ()
    fleet_url: str | None = None
    public_host: str = "127.0.0.1"

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
    def node_settings(self) -> Path:
        """The file of the settings of this machine's kubelet, where it has one."""
        return self.directory / "kubelet.toml"

    @property
    def socket(self) -> Path:
        """Where local agents connect to this machine's kubelet; not made where its path would be too long."""
        return self.kubelet_state / "relay.sock"

    @property
    def metrics(self) -> Path:
        """Where the relay serves its metrics; not made where its path would be too long."""
        return self.state.root / "metrics.sock"

    @property
    def shown(self) -> Path:
        """The directory that this machine's node shows by ``linux.files``, if it has that kind."""
        return self.directory / "shown"

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
        return self.fleet_url or f"http://{self.public_host}:{self.relay_port}"

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
_POLL_S, _LONGEST_POLL_S = 0.1, 3.0
_ISSUED_AT_ONCE = 100
# As the MCP SDK's own clients: a stream without messages is not broken.
_TIMEOUT = httpx2.Timeout(30, read=300)

_ResultT = TypeVar("_ResultT")

OnStep = Callable[[str], None]
"""Called with a line for each step that is done."""


@dataclass(frozen=True, slots=True)
class LocalSystem:
    """A system that was started, and how to connect to it.

    Attributes:
        real_node: this machine's; of a further relay the mock node behind it.
        relay, fleet: the names of the processes of its relay and of its mock nodes.
    """

    plan: Plan
    processes: Processes
    token: str
    real_node: str
    mock_nodes: list[str]
    relay: str = "relay"
    fleet: str = "fleet"

    @asynccontextmanager
    async def client(self, mode: str = "auto", path: str = MCP_PATH) -> AsyncIterator[Client]:
        """Hold an official MCP client at ``path``; ``mode`` is as ``mcp.client.Client`` has it."""
        headers = {"Authorization": f"Bearer {self.token}"}
        # No proxy: it would get the token, and cannot reach this machine's loopback.
        async with httpx2.AsyncClient(headers=headers, timeout=_TIMEOUT, trust_env=False) as http:
            transport = streamable_http_client(mcp_url(self.plan.url, path), http_client=http)
            async with Client(transport, mode=mode) as client:
                yield client

    def remote_tools(self, audit: Path) -> RemoteTools:
        """Return the client of an agent runtime that does not trust the relay; it records in ``audit``."""
        return RemoteTools(
            HttpServer(mcp_url(self.plan.url, KINDS_PATH), BearerToken(self.token)),
            permissions=Permissions(allow=("*",), scopes=frozenset(READ_ONLY)),
            verify_manifests=self.plan.state.ca / "root.pem",
            kinds=self.plan.kinds,
            audit=audit,
        )

    async def until_listed(self) -> list[Tool]:
        """Wait until every node is connected and listed, since calls could only fail; return the tools.

        This machine's node announces kinds beside RFC-0001's once it knows that its relay has them.

        Raises:
            StartError: a process ended first.
        """
        async with self.client() as client:
            wanted = {self.real_node, *self.mock_nodes}
            while True:
                tools = await until_listed(client, wanted, self.processes.check)
                listed = {name.kind_short for tool in tools if (name := parse(tool.name))}
                if (announced := self._announced_kinds()) is not None and announced <= listed:
                    return tools
                await asyncio.sleep(_POLL_S)

    def _announced_kinds(self) -> set[str] | None:
        """Return the short names of what this machine's node announces; None before it knows its relay's."""
        if not self.plan.kinds:
            return set()
        kinds = read_status(self.plan.kubelet_state)["kinds"]
        if any(state.get("relay") is False for state in kinds.values()):
            return None
        known = read_contract(self.plan.kinds).kinds
        return {kind.short for kind in known if kinds.get(kind.name, {}).get("announced")}


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
    mock_nodes = await issue_mock_nodes(ca, nodes, plan.mocks)
    step(f"CA          leaf certificates issued: {1 + len(mock_nodes)}")
    await processes.start("relay", relay_command(plan))
    await processes.until_listening(plan.relay_port)
    step(f"relay       {plan.url}")
    if _FILES in plan.kinds:
        _write_ceiling(plan)
    await processes.start("kubelet", kubelet_command(plan))
    step(f"kubelet     this machine is node {real_node}")
    if mock_nodes:
        await processes.start("fleet", fleet_command(plan))
        step(f"fleet       {len(mock_nodes)} mock nodes")
    token = issue_token(plan, "demo-agent")
    return LocalSystem(plan, processes, token, real_node, mock_nodes)


async def issue_mock_nodes(
    ca: CertificateAuthority, count: int, out: Path, tenant: str = TENANT
) -> list[str]:
    """Make ``count`` identities below ``out``, and return their node ids.

    On a thread, since thousands take a minute; a cancellation waits for a part of them, and not for all.
    """
    node_ids: list[str] = []
    while len(node_ids) < count:
        part = min(_ISSUED_AT_ONCE, count - len(node_ids))
        node_ids += await to_its_end(asyncio.to_thread(ca.issue_mock, part, out, tenant))
    return node_ids


async def until_listed(client: Client, wanted: AbstractSet[str], check: Callable[[], None]) -> list[Tool]:
    """Wait until the nodes ``wanted`` are connected and listed; return all tools.

    Connected, since tools stay listed for a while after a node has disconnected. A page of nodes is read
    again until its own are connected, and only then the next one: reading thousands of nodes at each attempt
    would use up the agent's rate, and keep the relay from accepting them.

    ``check`` is called before each attempt; what it raises ends the wait.
    """
    waits = Backoff(_POLL_S, _LONGEST_POLL_S)
    cursor: str | None = ""
    while cursor is not None:
        check()
        connected, following = await page_of_nodes(client, cursor)
        page = {node for node in wanted if cursor < node and (following is None or node <= following)}
        if page <= connected:
            cursor = following
            waits.reset()
        else:
            await asyncio.sleep(waits.next_s())
    while True:
        check()
        tools = await list_tools(client)
        if wanted <= {name.node_id for tool in tools if (name := parse(tool.name))}:
            return tools
        await asyncio.sleep(waits.next_s())


async def page_of_nodes(client: Client, cursor: str = "") -> tuple[set[str], str | None]:
    """Return which nodes of the page behind ``cursor`` are connected, and the cursor of the next page."""
    uri = f"fleet://nodes?cursor={cursor}" if cursor else "fleet://nodes"
    read = await _within_rate(lambda: client.read_resource(uri, cache_mode="bypass"))
    text = "".join(item.text for item in read.contents if isinstance(item, TextResourceContents))
    page = json.loads(text)
    return {node["node_id"] for node in page["nodes"] if node["connected"]}, page.get("nextCursor")


async def list_tools(client: Client) -> list[Tool]:
    """Return all pages of ``tools/list``, fresh."""
    tools: list[Tool] = []
    cursor: str | None = None
    while True:
        page = await _within_rate(partial(client.list_tools, cursor=cursor, cache_mode="bypass"))
        tools += page.tools
        cursor = page.next_cursor
        if cursor is None:
            return tools


async def _within_rate(ask: Callable[[], Awaitable[_ResultT]]) -> _ResultT:
    """Return what ``ask`` returns; what the relay's rate limit refuses is asked again later."""
    waits = Backoff(_POLL_S, _LONGEST_POLL_S)
    while True:
        try:
            return await ask()
        except MCPError as error:
            envelope = error.data if isinstance(error.data, dict) else {}
            if envelope.get("code") != Failure.RATE_LIMITED.value.code:
                raise
            wait_ms = envelope["retry_after_ms"]
        # A list is charged before and after it is read: what is given as the time may not be enough for both.
        await asyncio.sleep(wait_ms / 1000 + waits.next_s())


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
    await asyncio.to_thread(_issue, ca, Path(facts["csr"]), leaf)
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
        *(("--metrics-listen", str(plan.metrics)) if fits_socket(plan.metrics) else ()),
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
        *(("--config", str(plan.node_settings)) if _FILES in plan.kinds else ()),
        *_kinds(plan),
        *("--broker", plan.broker),
        *(word for url in plan.node_relays for word in ("--relay", url)),
    ]


def _write_ceiling(plan: Plan) -> None:
    """Let this machine's node show one directory, of the demo's own: no other is by itself."""
    plan.shown.mkdir()
    (plan.shown / "hello.txt").write_text("hello from the demo\n", "ascii")
    table = f'["{_FILES}"]\ndirectories = [{json.dumps(str(plan.shown))}]\n'
    write_atomic(plan.node_settings, table, PRIVATE)


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
    key = load_or_create_key(plan.state.token_key, os.urandom)
    # By their names: a kind that is sensitive is not reached otherwise.
    kinds = ("*", *plan.kinds) if plan.kinds else ()
    issued, token = signed(
        key, plan.public_url, sub=sub, tenant=tenant, scopes=scopes, ttl_s=_TOKEN_TTL_S, kinds=kinds
    )
    IssuedTokens(plan.state.issued_tokens).add(issued)
    return token


def _python(package: str) -> list[str]:
    # -P: else Python would take modules from the working directory first.
    return [sys.executable, "-P", "-m", package]


FLEET = "main"
SERVER = "cluster"
_STREAMS_WITHIN_S = 10.0
_FEW_WAKE_UPS = MappingProxyType({"GOMAXPROCS": "1", "GODEBUG": "schedtrace=2147483647"})
"""For a server of few messages, beside the relays: it spends more on waking its threads than on messages.

One of them runs at a time. The thread that watches the others is not woken at each message, but by a timer a
hundred times a second: that is what a trace of the scheduler changes, here one line in 24 days.
"""


async def start_cluster_server(plan: Plan, processes: Processes) -> Plan:
    """Start the server that joins the relays; return the plan whose relay connects to it.

    Raises:
        ProgramError: there is no nats-server.
        StartError: it has ended.
    """
    listen = HostPort("127.0.0.1", processes.ports.take())
    account, config = account_of(FLEET), plan.directory / "cluster.conf"
    users = [_new_user(plan.directory / f"{name}.seed") for name in ("cluster-administrator", "cluster")]
    write_atomic(config.with_name(account_file(account)), account_text(account, FLEET, users[0], users[1:]))
    store = str(plan.directory / "cluster")
    write_atomic(config, server_text("edge-cluster", listen, account, store=store, tls=False))
    program = await asyncio.to_thread(find_nats_server)
    await processes.start(SERVER, [str(program), "-c", str(config)], _FEW_WAKE_UPS)
    await processes.until_listening(listen.port)
    administrator = Credentials(
        (plan.directory / "cluster-administrator.seed").read_text("ascii").strip(), None
    )
    async with administering([ClusterServer(listen.host, listen.port, tls=False)], administrator) as client:
        await make_streams(client, FLEET, 1, _STREAMS_WITHIN_S)
    credentials = plan.directory / "cluster.seed"
    options = ("--cluster", f"nats://{listen}", "--cluster-credentials", str(credentials))
    fleet_url = f"http://127.0.0.1:{processes.ports.take()}"
    return replace(plan, relay_options=(*plan.relay_options, *options), fleet_url=fleet_url)


def _new_user(file: Path) -> User:
    seed, public_key = new_nkey(os.urandom)
    write_atomic(file, seed + "\n", PRIVATE)
    return {"nkey": public_key}


async def start_more_relays(
    first: Plan, count: int, processes: Processes, step: OnStep
) -> Sequence[LocalSystem]:
    """Start ``count`` relays besides the one of ``first``, and the node of each.

    Raises:
        StartError: a process could not be started.
    """
    ca = CertificateAuthority(first.state.ca, now_ms, os.urandom)
    started = []
    for number in range(2, 2 + count):
        plan = _plan_of(first, first.directory / f"relay-{number}", processes)
        (mock_node,) = await issue_mock_nodes(ca, 1, plan.mocks)
        kept = read_kept(first.state.settings)
        restore(save_for_another_relay(first.state, ca, kept, now_ms(), os.urandom), plan.state)
        token, name, fleet = issue_token(first, "demo-agent"), f"relay-{number}", f"fleet-{number}"
        await processes.start(name, relay_command(plan))
        await processes.until_listening(plan.relay_port)
        await processes.start(fleet, fleet_command(plan))
        step(f"relay {number}     {plan.url}, with node {mock_node}")
        started.append(LocalSystem(plan, processes, token, mock_node, [], name, fleet))
    return started


def _plan_of(first: Plan, directory: Path, processes: Processes) -> Plan:
    make_private_directory(directory)
    state = StateFiles(directory / "relay")
    return replace(first, directory=directory, state=state, relay_port=processes.ports.take())
