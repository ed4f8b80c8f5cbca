"""A demo that runs: the system that the end-to-end tests use."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
from mcp.client.client import Client
from mcp.client.streamable_http import streamable_http_client
from mcp_types import CallToolResult, TextContent

from kubelet.handlers.factory import make_handlers
from relay.cli.demo.local_system import LocalSystem, Plan, relay_command, start_system
from relay.cli.demo.processes import Processes
from relay.settings.config import StateFiles
from schemas.addresses import KINDS_PATH, mcp_url
from schemas.keys import from_base64url
from schemas.process.logs import make_logger
from schemas.registry import read_contract
from tests.fakes.ports import unused_port
from tests.fakes.shipped_kinds import ECHO, LINUX, METRICS

START_TIMEOUT_S = 120
STOP_TIMEOUT_S = 30
CALLED_TIMEOUT_S = 60
# As the MCP SDK has it for its own clients: a stream on which nothing is to be said yet is not broken.
TIMEOUT = httpx2.Timeout(30, read=300)


@dataclass(frozen=True, slots=True)
class Demo:
    """The facts of ``--ready-file``, and the ways to speak to what they name.

    Attributes:
        printed: the lines that it has printed: until it served, and to its end once it has ended.
        kinds: those of this machine besides RFC-0001's.
    """

    ready_file: Path
    facts: dict[str, Any]
    pid: int
    printed: list[str]
    kinds: tuple[str, ...] = LINUX

    @property
    def base_url(self) -> str:
        """The relay's public URL."""
        return str(self.facts["mcp_url"]).removesuffix(KINDS_PATH)

    @property
    def mcp_url(self) -> str:
        """The URL of the nodes' own tools, by their canonical names."""
        return mcp_url(self.base_url)

    @property
    def directory(self) -> Path:
        """Where all files of the demo are."""
        return Path(self.facts["audit"]).parents[1]

    def log(self, program: str) -> Path:
        """Return the log of one of the demo's programs."""
        return self.directory / f"{program}.log"

    def state(self, program: str) -> Path:
        """Return the state directory of one of the demo's programs."""
        return self.directory / program

    @property
    def metrics(self) -> Path:
        """Where the relay serves its metrics."""
        return self.state("relay") / "metrics.sock"

    @property
    def real_node(self) -> str:
        """This machine's node id."""
        return next(str(node["node_id"]) for node in self.facts["nodes"] if node["real"])

    @property
    def mock_nodes(self) -> list[str]:
        """The node ids of the mock nodes."""
        return [str(node["node_id"]) for node in self.facts["nodes"] if not node["real"]]

    @property
    def tool_names(self) -> list[str]:
        """The canonical name of each tool, sorted: this machine's, and echo and metrics of each mock node."""
        contract = read_contract(self.kinds)
        of_this_machine = [
            handler.capability
            for handler in make_handlers(self.real_node, make_logger("kubelet", sys.stderr), contract)
        ]
        pairs = [(self.real_node, capability) for capability in of_this_machine]
        pairs += [(node, capability) for node in self.mock_nodes for capability in (ECHO, METRICS)]
        kinds = {kind.name: kind.short for kind in contract.kinds}
        return sorted(
            f"{kinds[capability['kind']]}.{node}.{capability['cap_id']}.{verb}"
            for node, capability in pairs
            for verb in capability["verbs"]
        )

    def audit(self) -> list[dict[str, Any]]:
        lines = Path(self.facts["audit"]).read_text("utf-8").splitlines()
        return [json.loads(line) for line in lines]

    @asynccontextmanager
    async def client(self, mode: str = "auto", query: str = "", **options: Any) -> AsyncIterator[Client]:
        """Hold the official client in the era that ``mode`` names, as ``mcp.client.Client`` has it."""
        headers = {"Authorization": f"Bearer {self.facts['token']}"}
        async with httpx2.AsyncClient(headers=headers, timeout=TIMEOUT) as http:
            transport = streamable_http_client(self.mcp_url + query, http_client=http)
            async with Client(transport, mode=mode, **options) as client:
                yield client


async def called(client: Client, node_id: str) -> str:
    """Return ``ok``, or the code of the error, of one echo."""
    result = await client.call_tool(f"sysecho.{node_id}.echo.invoke", {"message": "ping"})
    return error_of(result)["code"] if result.is_error else "ok"


async def until_called(client: Client, node_id: str, *wanted: str) -> None:
    """Wait until a call of the node ends as one of ``wanted``."""
    async with asyncio.timeout(CALLED_TIMEOUT_S):
        while await called(client, node_id) not in wanted:  # noqa: ASYNC110 - nothing announces it
            await asyncio.sleep(0.1)


def jti_of(token: str) -> str:
    """Return the id of a token of the relay's."""
    return str(json.loads(from_base64url(token.split(".")[1]))["jti"])


def plan_below(directory: Path) -> Plan:
    """Return a plan for a system whose parts a test may stop and start again: its ports stay its own."""
    return Plan(
        directory=directory,
        state=StateFiles(directory / "relay"),
        relay_port=unused_port(),
        loopback_port=unused_port(),
        broker_port=unused_port(),
    )


@asynccontextmanager
async def local_system(directory: Path, mock_nodes: int) -> AsyncIterator[LocalSystem]:
    """Hold the system of a demo, whose parts can be stopped and started, once its tools are listed."""
    async with Processes.running(directory) as processes:
        system = await start_system(plan_below(directory), mock_nodes, processes, lambda _text: None)
        async with asyncio.timeout(START_TIMEOUT_S):
            await system.until_listed()
        yield system


async def restart_relay(system: LocalSystem) -> None:
    """Kill the relay, start it again, and return when it serves."""
    await system.processes.kill("relay")
    await system.processes.start("relay", relay_command(system.plan))
    await system.processes.until_listening(system.plan.relay_port)


async def relay_output(system: LocalSystem, *arguments: str | Path) -> str:
    """Run a command of the relay on its own machine, and return what it printed."""
    state = system.plan.state.root
    command = [sys.executable, "-P", "-m", "relay", *map(str, arguments), "--state-dir", str(state)]
    return await system.processes.output(command)


def environment_of(sources: Path) -> dict[str, str]:
    """Return the environment in which the packages below ``sources`` come before those that are installed."""
    return {**os.environ, "PYTHONPATH": str(sources)}


@contextmanager
def running_demo(directory: Path, *arguments: str, sources: Path | None = None) -> Iterator[Demo]:
    """Run ``relay demo`` until it serves; Ctrl-C it on the way out, and expect that it ends well.

    With the packages below ``sources`` where that is given, instead of those that are installed.
    """
    ready = directory / "ready.json"
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "relay", "demo", "--ready-file", str(ready), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        cwd=sources,
        env=environment_of(sources) if sources else None,
    )
    assert process.stdout is not None
    printed = list[str]()
    try:
        _until_it_serves(process.stdout, printed)
        kinds = () if "none" in arguments else LINUX
        yield Demo(ready, json.loads(ready.read_text("utf-8")), process.pid, printed, kinds)
    finally:
        process.send_signal(signal.SIGINT)
        rest, _ = process.communicate(timeout=STOP_TIMEOUT_S)
        printed += rest.splitlines(keepends=True)
    assert process.returncode == 0
    assert not ready.exists()


def _until_it_serves(lines: Iterable[str], printed: list[str]) -> None:
    for line in lines:
        printed.append(line)
        # The last one: what was read ahead of it would be lost to ``communicate``.
        if line.startswith("The node's own status"):
            return
    raise AssertionError("the demo ended by itself:\n" + "".join(printed))


def error_of(result: CallToolResult) -> dict[str, Any]:
    """Return the error envelope of a failed call, after checking that it is said everywhere alike."""
    assert result.is_error
    assert result.structured_content is None
    [content] = result.content
    assert isinstance(content, TextContent)
    envelope: dict[str, Any] = json.loads(content.text)
    assert (result.meta or {})["edge-kubelet/error"] == envelope
    assert (result.meta or {})["edge-kubelet/hop"] in {"relay", "session", "node"}
    return envelope
