"""The configuration for HAProxy that docs/cluster.md names, in front of two relays, with HAProxy itself."""

import asyncio
import json
import ssl
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from ipaddress import ip_network
from pathlib import Path

import httpx2
import pytest
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from relay.http.proxies import TrustedProxies
from schemas.addresses import HostPort
from schemas.registry import SchemaRegistry
from schemas.tls import client_context
from tests.fakes.hub import Hub
from tests.fakes.mcp_wire import ERA_META, NEW, OLD, McpWire
from tests.fakes.ports import unused_port
from tests.fakes.proxied import installed, running_proxy, welcomed
from tests.fakes.served_relay import ServedRelay
from tests.fakes.server_ca import SimulatedServerCa, server_key_named
from tests.fakes.serving import Server

pytestmark = pytest.mark.integration

CONFIGURATION = Path(__file__).parents[3] / "docs" / "cluster" / "haproxy.cfg"
NAME = "relay.example"
BOUND_S = 30
CALLS = 8
TOOL = "sysecho.nowhere.echo.invoke"
_CHECKS = 4
"""Two of each of the two backends."""
LIST = json.dumps({"jsonrpc": "2.0", "id": 1, "method": "tools/list", "params": {}}).encode()


@dataclass(frozen=True)
class Balanced:
    """Two relays behind HAProxy, and the ports of HAProxy for agents and for nodes."""

    relays: list[ServedRelay]
    roots: str
    agents: int
    nodes: int

    def shares(self) -> list[int]:
        """Return how many requests of agents each relay has served, and forget them."""
        shares = [relay.requests.count("/mcp") for relay in self.relays]
        for relay in self.relays:
            relay.requests.clear()
        return shares

    @asynccontextmanager
    async def agent(self, era: str) -> AsyncIterator[McpWire]:
        """Hold a client of one era."""
        tls = client_context(self.roots)
        async with McpWire.open(
            HostPort("127.0.0.1", self.agents), era, self.relays[0].hub.token(), tls=tls, name=NAME
        ) as wire:
            yield wire


async def until_judged(relays: list[ServedRelay]) -> None:
    """Wait until HAProxy has asked each relay often enough to give up one that it finds not ready."""
    async with asyncio.timeout(BOUND_S):
        while min(relay.requests.count("/readyz") for relay in relays) < _CHECKS:  # noqa: ASYNC110 - no event
            await asyncio.sleep(0.01)
    for relay in relays:
        relay.requests.clear()


@pytest.fixture
async def balanced(tmp_path: Path, registry: SchemaRegistry) -> AsyncIterator[Balanced]:
    now_ms = time.time_ns() // 1_000_000
    servers, key = SimulatedServerCa("root of servers", now_ms), server_key_named("relay")
    roots, shown = tmp_path / "roots.pem", tmp_path / "relay.pem"
    roots.write_text(servers.root_pem)
    certificate = servers.issue("relay", [NAME, "127.0.0.1"], key.public_key())
    shown.write_text(
        certificate + key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()).decode()
    )
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(shown)
    async with AsyncExitStack() as stack:
        relays = []
        for number in (1, 2):
            directory = tmp_path / f"relay-{number}"
            directory.mkdir()
            hub = Hub(directory, registry)
            stack.callback(hub.close)
            server = await stack.enter_async_context(
                Server.running(tls, proxies=TrustedProxies([ip_network("127.0.0.1")]))
            )
            relays.append(await stack.enter_async_context(ServedRelay.open(hub, server)))
        agents, nodes = unused_port(), unused_port()
        text = CONFIGURATION.read_text("utf-8")
        for old, new in (
            ("maxconn 50000", "maxconn 500"),  # two files each, of which CI may allow fewer
            ("inter 2s fall 2", "inter 1s fall 1"),
            ("bind :443", f"bind 127.0.0.1:{agents}"),
            ("bind :8443", f"bind 127.0.0.1:{nodes}"),
            ("/etc/haproxy/relay.example.pem", str(shown)),
            ("/etc/haproxy/server-root.pem", str(roots)),
            ("192.0.2.1:8700", str(relays[0].address)),
            ("192.0.2.2:8700", str(relays[1].address)),
        ):
            assert old in text
            text = text.replace(old, new)
        file = tmp_path / "haproxy.cfg"
        file.write_text(text)
        program = installed("haproxy")
        await stack.enter_async_context(running_proxy([program, "-db", "-f", str(file)], agents))
        await until_judged(relays)
        yield Balanced(relays, servers.root_pem, agents, nodes)


async def test_the_new_era_goes_to_any_relay_and_a_session_of_the_old_one_stays(balanced: Balanced) -> None:
    async with balanced.agent(NEW) as agent:
        for number in range(CALLS):
            params = {"name": TOOL, "arguments": {}, "_meta": ERA_META}
            call = {"jsonrpc": "2.0", "id": number, "method": "tools/call", "params": params}
            response = await agent.post(json.dumps(call).encode(), **{"mcp-name": TOOL})
            assert response.status_code == httpx2.codes.OK
    assert min(balanced.shares()) > 0
    for _ in range(2):
        async with balanced.agent(OLD) as agent:
            for _ in range(CALLS):
                assert (await agent.post(LIST)).status_code == httpx2.codes.OK
        shares = balanced.shares()
        assert min(shares) == 0
        assert max(shares) > 0  # of those on one connection, only the first and some others pass by ASGI


async def test_nodes_verify_the_relay_through_it_and_their_certificate_reaches_the_relay(
    balanced: Balanced,
) -> None:
    await welcomed(balanced.relays[0].hub, balanced.nodes, client_context(balanced.roots))


@pytest.mark.parametrize("way", ["agents", "nodes"])
async def test_a_relay_knows_the_address_of_each_client(balanced: Balanced, way: str) -> None:
    port, tls = getattr(balanced, way), client_context(balanced.roots)
    client = "127.0.0.2"  # no proxy that is trusted
    async with asyncio.timeout(BOUND_S):
        reader, writer = await asyncio.open_connection(
            "127.0.0.1", port, ssl=tls, server_hostname=NAME, local_addr=(client, 0)
        )
        writer.write(
            f"POST /mcp HTTP/1.1\r\nHost: {NAME}\r\nAuthorization: Bearer x\r\nConnection: close\r\n"
            "X-Forwarded-For: 203.0.113.7\r\n\r\n".encode()
        )
        assert (await reader.read()).startswith(b"HTTP/1.1 401 ")
        writer.close()
    refused = [line for relay in balanced.relays for line in relay.refusals()]
    assert refused == [("token_refused", client, "malformed", 1)]


async def test_a_connection_for_another_name_reaches_no_relay(balanced: Balanced) -> None:
    tls = client_context(balanced.roots)
    with pytest.raises((ssl.SSLError, ConnectionError)):
        await asyncio.wait_for(
            asyncio.open_connection("127.0.0.1", balanced.nodes, ssl=tls, server_hostname="other.example"),
            BOUND_S,
        )
    assert all(not relay.requests or set(relay.requests) == {"/readyz"} for relay in balanced.relays)
