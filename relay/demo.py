"""``relay demo``: the whole system on this machine, seen through the official MCP client.

Every part is the real one, in a process of its own: broker, relay, this machine's kubelet, and mock nodes.
Everything lies in one temporary directory, and is gone when it ends. Must not take short cuts that a user
could not take.
"""

import asyncio
import json
import os
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx2
from mcp.client.client import Client
from mcp.client.streamable_http import streamable_http_client
from mcp_types import CallToolResult, TextContent, Tool

from relay.auth import TokenIssuer, load_or_create_token_key
from relay.ca import CertificateAuthority
from relay.config import StateFiles
from relay.processes import Processes, StartError, find_program, free_port
from relay.samples import lines_of
from schemas.addresses import mcp_url
from schemas.files import PRIVATE, write_atomic
from schemas.projection import parse
from schemas.registry import SchemaRegistry
from schemas.text import printable

_RELAY_PORT = 8700
_LOOPBACK_PORT = 8701
_BROKER_PORT = 1883
_TENANT = "demo"
_TOKEN_TTL_S = 12 * 3600
_READY_TIMEOUT_S = 60
_POLL_S = 0.1

_BROKER_CONFIG = """\
server_name: demo
listen: "127.0.0.1:-1"
jetstream {{ store_dir: {store} }}
mqtt {{ listen: "127.0.0.1:{port}" }}
"""


class DemoError(Exception):
    """The demo cannot go on; the text says why."""


@dataclass(frozen=True, slots=True)
class _Plan:
    """Where everything of one demo is."""

    directory: Path
    state: StateFiles
    relay_port: int
    loopback_port: int
    broker_port: int

    @property
    def public_url(self) -> str:
        return f"http://127.0.0.1:{self.relay_port}"

    @property
    def broker(self) -> str:
        return f"127.0.0.1:{self.broker_port}"


@dataclass(frozen=True, slots=True)
class _Running:
    """What a user needs to know of a demo that is up."""

    plan: _Plan
    token: str
    real_node: str
    mock_nodes: list[str]
    relay_pid: int
    kubelet_pid: int


async def run_demo(*, nodes: int, once: bool, ready_file: Path | None) -> bool:
    """Start everything with ``nodes`` mock nodes, call each tool, and serve on unless ``once``.

    Returns whether every call worked.

    Raises:
        DemoError: something could not be started.
    """
    with tempfile.TemporaryDirectory(prefix="edge-kubelet-demo-") as name:
        directory = Path(name)
        async with AsyncExitStack() as stack:
            processes = await stack.enter_async_context(Processes.running(directory))
            try:
                running = await _start(_plan(directory), nodes, processes)
                async with asyncio.timeout(_READY_TIMEOUT_S):
                    await _until_listed(running, processes)
            except (StartError, TimeoutError) as error:
                raise DemoError(str(error) or f"not ready after {_READY_TIMEOUT_S} s") from None
            if ready_file is not None:
                write_atomic(ready_file, json.dumps(_ready_facts(running)) + "\n", PRIVATE)
                stack.callback(ready_file.unlink, missing_ok=True)
            worked = await _show_calls(running)
            if not once:
                _show_how_to_connect(running)
                await processes.until_one_ends()
                raise DemoError("a part of the demo has ended by itself")
    return worked


def _plan(directory: Path) -> _Plan:
    return _Plan(
        directory=directory,
        state=StateFiles(directory / "relay"),
        relay_port=free_port(_RELAY_PORT),
        loopback_port=free_port(_LOOPBACK_PORT),
        broker_port=free_port(_BROKER_PORT),
    )


async def _start(plan: _Plan, nodes: int, processes: Processes) -> _Running:
    started = time.monotonic()

    def step(text: str) -> None:
        _say(f"  {time.monotonic() - started:5.1f} s  {text}")

    _say("Starting an edge of its own on this machine:")
    store = json.dumps(str(plan.directory / "broker"))
    config = plan.directory / "broker.conf"
    config.write_text(_BROKER_CONFIG.format(store=store, port=plan.broker_port), "utf-8")
    await processes.start("broker", [find_program("nats-server"), "-c", str(config)])
    await processes.until_listening(plan.broker_port)
    step(f"broker      nats-server, MQTT on {plan.broker}")

    ca = CertificateAuthority(plan.state.ca, _now_ms, os.urandom)
    ca.create()
    real_node, kubelet_state = await _enrol(plan, ca, processes)
    mock_nodes = ca.issue_mock(nodes, plan.directory / "mocks", _TENANT) if nodes else []
    step(f"CA          {1 + len(mock_nodes)} leaf certificates issued")

    relay_pid = await processes.start("relay", _relay_command(plan))
    await processes.until_listening(plan.relay_port)
    step(f"relay       {plan.public_url}")

    common = ["--broker", plan.broker, "--relay", plan.public_url]
    kubelet_pid = await processes.start(
        "kubelet",
        [
            *_python("kubelet"),
            "run",
            *("--state-dir", str(kubelet_state)),
            *("--loopback-port", str(plan.loopback_port)),
            *common,
        ],
    )
    step(f"kubelet     this machine is node {real_node}")
    if mock_nodes:
        identities = ["--identities", str(plan.directory / "mocks")]
        await processes.start("fleet", [*_python("kubelet"), "fleet", *identities, *common])
        step(f"fleet       {len(mock_nodes)} mock nodes")
    return _Running(plan, _issue_token(plan), real_node, mock_nodes, relay_pid, kubelet_pid)


async def _enrol(plan: _Plan, ca: CertificateAuthority, processes: Processes) -> tuple[str, Path]:
    """Give this machine an identity by the commands that a user would type; return its id and directory."""
    state_dir = plan.directory / "kubelet"
    init = [*_python("kubelet"), "init", "--json", "--state-dir", str(state_dir)]
    facts = json.loads(await processes.output("kubelet init", init))
    leaf = plan.directory / "leaf.pem"
    _issue(ca, Path(facts["csr"]), leaf)
    install = [*init, "--certificate", str(leaf), "--root", str(ca.root_file)]
    await processes.output("kubelet init", install)
    return str(facts["node_id"]), state_dir


def _issue(ca: CertificateAuthority, csr: Path, leaf: Path) -> None:
    leaf.write_text(ca.issue(csr.read_text("utf-8"), _TENANT), "utf-8")


def _relay_command(plan: _Plan) -> list[str]:
    return [
        *_python("relay"),
        "run",
        *("--broker", plan.broker),
        *("--public-url", plan.public_url),
        *("--listen", f"127.0.0.1:{plan.relay_port}"),
        *("--state-dir", str(plan.state.root)),
    ]


def _issue_token(plan: _Plan) -> str:
    key = load_or_create_token_key(plan.state.token_key)
    issuer = TokenIssuer(key, plan.public_url, mcp_url(plan.public_url), SchemaRegistry())
    return issuer.issue(
        sub="demo-agent",
        tenant=_TENANT,
        scopes=["tools:call:read_only"],
        now_s=_now_ms() // 1000,
        ttl_s=_TOKEN_TTL_S,
        jti=os.urandom(16).hex(),
    )


@asynccontextmanager
async def _client(running: _Running) -> AsyncIterator[Client]:
    headers = {"Authorization": f"Bearer {running.token}"}
    async with httpx2.AsyncClient(headers=headers) as http:
        transport = streamable_http_client(mcp_url(running.plan.public_url), http_client=http)
        async with Client(transport) as client:
            yield client


async def _until_listed(running: _Running, processes: Processes) -> None:
    """Wait until every node's tools are listed: until then, a call could only fail."""
    wanted = {running.real_node, *running.mock_nodes}
    async with _client(running) as client:
        while True:
            processes.check()
            tools = await _all_tools(client)
            if wanted <= {name.node_id for tool in tools if (name := parse(tool.name))}:
                return
            await asyncio.sleep(_POLL_S)


async def _all_tools(client: Client) -> list[Tool]:
    tools: list[Tool] = []
    cursor: str | None = None
    while True:
        page = await client.list_tools(cursor=cursor, cache_mode="bypass")
        tools += page.tools
        cursor = page.next_cursor
        if cursor is None:
            return tools


async def _show_calls(running: _Running) -> bool:
    worked = True
    async with _client(running) as client:
        tools = await _all_tools(client)
        _say(
            f"\nThe official MCP client (protocol {client.protocol_version}) lists {len(tools)} tools. Calling each:"
        )
        # This machine first: it is what somebody who tries this wants to see.
        for tool in sorted(tools, key=lambda tool: running.real_node not in tool.name):
            arguments = {"message": "hello from the demo"} if ".echo." in tool.name else {}
            started = time.perf_counter()
            result = await client.call_tool(tool.name, arguments)
            took_ms = (time.perf_counter() - started) * 1000
            real = running.real_node in tool.name
            worked = worked and not result.is_error
            _say(f"\n  {tool.name}\n    {'this machine' if real else 'mock node'}, {took_ms:.1f} ms")
            _show(result)
    return worked


def _show(result: CallToolResult) -> None:
    content = result.structured_content
    if result.is_error or not isinstance(content, dict):
        text = next((item.text for item in result.content if isinstance(item, TextContent)), "no content")
        _say(f"    FAILED  {printable(text, 600)}")
        return
    for label, line in lines_of(content):
        _say(f"    {label:<8}  {line}")


def _show_how_to_connect(running: _Running) -> None:
    url = mcp_url(running.plan.public_url)
    _say(f"\nServing until Ctrl-C.\n\n  MCP URL  {url}\n  token    {running.token}\n")
    _say("Paste this to give Claude Code these tools:\n")
    _say(f'  claude mcp add --transport http edge "{url}" --header "Authorization: Bearer {running.token}"\n')
    _say(f"This node's own view: curl http://127.0.0.1:{running.plan.loopback_port}/readyz")


def _ready_facts(running: _Running) -> dict[str, object]:
    plan = running.plan
    return {
        "mcp_url": mcp_url(plan.public_url),
        "token": running.token,
        "broker": plan.broker,
        "ca_root": str(plan.state.ca / "root.pem"),
        "audit": str(plan.state.audit),
        "nodes": [
            {"node_id": running.real_node, "real": True},
            *({"node_id": node_id, "real": False} for node_id in running.mock_nodes),
        ],
        "loopback_url": f"http://127.0.0.1:{plan.loopback_port}",
        "relay_pid": running.relay_pid,
        "kubelet_pid": running.kubelet_pid,
    }


def _python(package: str) -> list[str]:
    return [sys.executable, "-m", package]


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


def _say(text: str) -> None:
    print(text, flush=True)  # noqa: T201 - what a person asked to see
