"""One relay and one node over TLS, of one version each, beside a broker."""

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
from mcp.client.client import Client
from mcp.client.streamable_http import streamable_http_client

from relay.cli.demo.local_system import until_listed
from relay.cli.demo.processes import Processes
from schemas.addresses import BrokerAddress, mcp_url
from schemas.files import PRIVATE, write_atomic
from schemas.tls import client_context
from tests.fakes import steady_caller
from tests.fakes.mqtt_listener import MqttListener
from tests.fakes.polling import until
from tests.fakes.ports import unused_port

_BOUND_S = 60
_HEARTBEATS = 3
_TENANT = "acme"


@dataclass(frozen=True, slots=True)
class Programs:
    """``relay`` and ``kubelet`` of one version, which lie in ``directory``."""

    directory: Path
    version: str
    second: str = "1s"
    """How this version writes the shortest heartbeat on its command line."""

    def command(self, *arguments: str | Path) -> list[str]:
        """Return what runs a module of this version: its directory precedes the installed one."""
        here = f"PYTHONPATH={self.directory}"
        return ["env", here, sys.executable, "-P", "-m", *map(str, arguments)]


class Site:
    """What stays while versions change: the directories, the ports and the broker."""

    def __init__(self, directory: Path, broker: BrokerAddress, processes: Processes) -> None:
        self.processes = processes
        self.relay_state = directory / "relay"
        self._node_state = directory / "node"
        self.broker = broker
        self._port = unused_port()
        self.url = f"https://127.0.0.1:{self._port}"

    async def relay(self, programs: Programs, *arguments: str) -> str:
        """Run a command of the relay and return what it printed."""
        command = programs.command("relay", *arguments, "--state-dir", self.relay_state)
        return await self.processes.output(command)

    async def start_relay(self, programs: Programs) -> None:
        """Start the relay and wait until it listens."""
        serving = ["--listen", f"127.0.0.1:{self._port}", "--public-url", self.url, "--tls-own"]
        serving += ["--broker", f"mqtt://{self.broker.host}:{self.broker.port}"]
        command = programs.command("relay", "run", *serving, "--state-dir", self.relay_state)
        await self.processes.start("relay", command)
        await self.processes.until_listening(self._port)

    async def enroll(self, relay: Programs, node: Programs) -> str:
        """Enrol the node and return its id."""
        token_file = self._node_state.with_name("join-token")
        token = await self.relay(relay, "join-token", "create", "--tenant", _TENANT, "--public-url", self.url)
        write_atomic(token_file, token, PRIVATE)
        command = node.command("kubelet", "enroll", self.url, "--token-file", token_file)
        printed = await self.processes.output([*command, "--state-dir", str(self._node_state), "--json"])
        return str(json.loads(printed)["node_id"])

    async def start_node(self, programs: Programs, *options: str) -> None:
        """Start the daemon, with the shortest heartbeat that there is."""
        command = programs.command("kubelet", "run", "--state-dir", self._node_state, "--loopback-port", "0")
        await self.processes.start("node", [*command, "--heartbeat", programs.second, *options])

    async def start_caller(self, relay: Programs, tool: str) -> None:
        """Start a process that calls ``tool`` again and again."""
        token, roots = (self.relay_state.with_name(name) for name in ("agent-token", "roots"))
        write_atomic(token, await self.token(relay), PRIVATE)
        write_atomic(roots, self._roots(), PRIVATE)
        command = (
            sys.executable,
            "-P",
            steady_caller.__file__,
            mcp_url(self.url),
            str(roots),
            str(token),
            tool,
        )
        await self.processes.start("caller", command)

    def printed(self) -> str:
        """Return what the caller has printed until now."""
        return self.processes.log("caller").read_text("utf-8")

    def sessions(self) -> int:
        """Return how many sessions of the node the relay's log tells of."""
        return self.processes.log("relay").read_text().count('"node connected"')

    def calls(self) -> int:
        """Return how many calls of agents the relay's log tells of."""
        return self.processes.log("relay").read_text().count('"toolId"')

    async def token(self, relay: Programs) -> str:
        """Return an agent's token that the relay's own command has issued."""
        issued = ["token", "issue", "--sub", "agent", "--tenant", _TENANT, "--public-url", self.url]
        return (await self.relay(relay, *issued)).strip()

    @asynccontextmanager
    async def agent(self, relay: Programs) -> AsyncIterator["Agent"]:
        """Hold an agent of the relay."""
        token = await self.token(relay)
        headers = {"Authorization": f"Bearer {token}"}
        async with httpx2.AsyncClient(headers=headers, verify=client_context(self._roots())) as http:
            transport = streamable_http_client(mcp_url(self.url), http_client=http)
            async with asyncio.timeout(_BOUND_S), Client(transport) as client:
                assert client.server_info is not None
                assert client.server_info.version == relay.version
                yield Agent(client, self)

    def _roots(self) -> str:
        return "".join(file.read_text() for file in sorted((self.relay_state / "ca").glob("*.pem")))


@dataclass(frozen=True, slots=True)
class Agent:
    """An official MCP client."""

    client: Client
    site: Site

    async def until_listed(self, node_id: str) -> None:
        """Wait until the node's tools are listed."""
        await until_listed(self.client, {node_id}, self.site.processes.check)

    async def title(self, node_id: str) -> str | None:
        """Return the title of the node's echo, as it is listed."""
        tools = (await self.client.list_tools()).tools
        return next(tool.title for tool in tools if tool.name == f"sysecho.{node_id}.echo.invoke")

    async def uses(self, node_id: str) -> None:
        """Call each tool of the node, then the first again after heartbeats: all in one session."""
        await self.until_listed(node_id)
        before = self.site.calls()
        await self._echo(node_id)
        # The log is written a moment later, in order: the line of the call is behind that of the session.
        await until(lambda: self.site.calls() > before)
        sessions = self.site.sessions()
        assert sessions > 0
        assert (await self._result(f"sys.{node_id}.sysmetrics.snapshot", {}))["cpu"]
        assert (await self._result(f"sys.{node_id}.sysmetrics.subscribe", {"interval_ms": 1000}))["cpu"]
        async with MqttListener(self.site.broker, f"$devices/{node_id}/heartbeat").listening() as heartbeats:
            for _ in range(_HEARTBEATS):
                await heartbeats.next()
        await self._echo(node_id)
        assert self.site.sessions() == sessions

    async def _echo(self, node_id: str) -> None:
        result = await self._result(f"sysecho.{node_id}.echo.invoke", {"message": "hello"})
        assert result["message"] == "hello"

    async def _result(self, tool: str, arguments: dict[str, Any]) -> dict[str, Any]:
        result = await self.client.call_tool(tool, arguments)
        assert not result.is_error, result
        return dict(result.structured_content or {})
