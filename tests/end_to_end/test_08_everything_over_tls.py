"""8. Everything is encrypted, and the broker identifies each client by certificate.

Steps: a certificate for the broker · the relay, which serves with its own · the broker · enrol a node and run
it · call it as an agent · read the broker as the relay does, and without a certificate · revoke the node.
"""

import asyncio
import json
import ssl
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx2
import pytest
from mcp.client.client import Client
from mcp.client.streamable_http import streamable_http_client

from relay.cli.demo.local_system import list_tools, until_listed
from relay.cli.demo.processes import Processes
from relay.settings.config import StateFiles
from schemas.addresses import mcp_url
from schemas.files import PRIVATE, write_atomic
from schemas.identity_files import IdentityFiles
from schemas.tls import client_context
from tests.fakes.ports import unused_port
from tests.fakes.tls_broker import Peer, TlsBroker, until

pytestmark = pytest.mark.long

BOUND_S = 60
TENANT = "acme"


class Site:
    """A relay, a broker and a node; each command is one that an operator types."""

    def __init__(self, kind: str, directory: Path, processes: Processes) -> None:
        self.state = StateFiles(directory / "relay")
        self.node_state = directory / "node"
        self.port = unused_port()
        self.url = f"https://localhost:{self.port}"
        self.processes = processes
        self._directory = directory
        self.state.broker.mkdir(parents=True, mode=0o700)
        (directory / "edge").symlink_to(self.state.broker)
        self.broker = TlsBroker(kind, directory)

    async def relay(self, *arguments: str) -> str:
        """Run a command of the relay, and return what it printed."""
        return await self._output("relay", *arguments, "--state-dir", str(self.state.root))

    async def kubelet(self, *arguments: str) -> str:
        """Run a command of the node, and return what it printed."""
        return await self._output("kubelet", *arguments, "--state-dir", str(self.node_state))

    async def start_relay(self) -> None:
        """Start the relay, and return when it serves."""
        broker = f"mqtts://localhost:{self.broker.address.port}"
        command = [sys.executable, "-P", "-m", "relay", "run", "--state-dir", str(self.state.root)]
        command += ["--broker", broker, "--broker-pid-file", str(self.broker.pid_file)]
        command += ["--public-url", self.url, "--listen", f"127.0.0.1:{self.port}", "--tls-own"]
        await self.processes.start("relay", command)
        await self.processes.until_listening(self.port)

    async def start_node(self) -> str:
        """Enrol a node and start it; return its node id."""
        token = self._directory / "join-token"
        made = await self.relay("join-token", "create", "--tenant", TENANT, "--public-url", self.url)
        write_atomic(token, made, PRIVATE)
        facts = json.loads(await self.kubelet("enroll", self.url, "--token-file", str(token), "--json"))
        command = [sys.executable, "-P", "-m", "kubelet", "run", "--loopback-port", "0"]
        await self.processes.start("kubelet", [*command, "--state-dir", str(self.node_state)])
        return str(facts["node_id"])

    def root(self) -> ssl.SSLContext:
        """Return the context of who believes the root of servers, and shows nothing."""
        return client_context((self.state.ca / "server-root.pem").read_text())

    def peer(self, certificate: Path, key: Path) -> Peer:
        """Connect to the broker with that certificate."""
        root = (self.state.ca / "server-root.pem").read_text()
        return Peer(self.broker.address, client_context(root, (certificate, key)))

    @asynccontextmanager
    async def agent(self) -> AsyncIterator[Client]:
        """Hold an official MCP client that believes the relay by its root alone."""
        options = ["--sub", "agent", "--tenant", TENANT, "--public-url", self.url]
        token = (await self.relay("token", "issue", *options)).strip()
        headers = {"Authorization": f"Bearer {token}"}
        async with httpx2.AsyncClient(headers=headers, verify=self.root()) as http:
            transport = streamable_http_client(mcp_url(self.url), http_client=http)
            async with Client(transport) as client:
                yield client

    async def until_listed(self, client: Client, name: str, *, listed: bool = True) -> None:
        """Wait until the tool is listed and its node connected, or it is not listed any longer."""
        async with asyncio.timeout(BOUND_S):
            if listed:
                await until_listed(client, {name.split(".")[1]}, self.processes.check)
                return
            while name in {tool.name for tool in await list_tools(client)}:
                self.processes.check()

    async def _output(self, package: str, *arguments: str) -> str:
        return await self.processes.output([sys.executable, "-P", "-m", package, *arguments])


@pytest.fixture
async def site(broker_kind: str, tmp_path: Path) -> AsyncIterator[Site]:
    async with Processes.running(tmp_path) as processes:
        site = Site(broker_kind, tmp_path, processes)
        await site.relay("ca", "init")
        await site.relay("ca", "issue-server", "localhost", "127.0.0.1", "--out", str(site.state.broker))
        # The relay first: the broker does not start without its files, the generation last.
        await site.start_relay()
        async with asyncio.timeout(BOUND_S):
            while not (site.state.broker / "generation").exists():
                processes.check()
                await asyncio.sleep(0.01)
        await asyncio.to_thread(site.broker.start)
        try:
            yield site
        finally:
            await asyncio.to_thread(site.broker.stop)


async def test_a_node_is_called_announced_and_shut_out_and_nothing_travels_in_the_clear(site: Site) -> None:
    node_id = await site.start_node()
    name = f"sysecho.{node_id}.echo.invoke"
    own, files = site.state.broker_client_tls, IdentityFiles(site.node_state)
    async with site.agent() as client:
        await site.until_listed(client, name)
        answer = await client.call_tool(name, {"message": "over TLS"})
        assert (answer.structured_content or {})["message"] == "over TLS"

        # The broker holds what the node announced, for the relay and for no other client.
        relay = await asyncio.to_thread(site.peer, own.certificate, own.key)
        assert relay.subscribe(f"$devices/{node_id}/announce")
        topic, manifest = await asyncio.to_thread(relay.next)
        assert (topic, json.loads(manifest)["node_id"]) == (f"$devices/{node_id}/announce", node_id)
        stranger = await asyncio.to_thread(Peer, site.broker.address, site.root())
        assert not stranger.connected

        # Who does not believe the root says nothing to the relay, and who speaks in the clear hears nothing.
        async with httpx2.AsyncClient(verify=client_context()) as http:
            with pytest.raises(httpx2.ConnectError, match="certificate"):
                await http.get(site.url + "/readyz")
        async with httpx2.AsyncClient() as http:
            with pytest.raises(httpx2.HTTPError):
                await http.get(f"http://localhost:{site.port}/readyz")

        await site.relay("ca", "revoke", node_id)
        await site.until_listed(client, name, listed=False)
        refused = await client.call_tool(name, {"message": "still there?"})
        assert refused.is_error
    shut_out = await asyncio.to_thread(
        until, lambda: site.peer(files.leaf, files.key), lambda peer: not peer.connected
    )
    assert relay.connected
    for peer in (relay, stranger, shut_out):
        peer.close()
