"""The configuration for nginx that docs/operations.md names, in front of a relay, with nginx itself."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from ipaddress import ip_network
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from relay.http.proxies import TrustedProxies
from relay.http.request_meter import RequestMeter, RequestSource, Share
from schemas.addresses import HostPort
from schemas.registry import SchemaRegistry
from schemas.tls import client_context
from tests.fakes.hub import Hub
from tests.fakes.mcp_wire import NEW, OLD, McpWire
from tests.fakes.ports import unused_port
from tests.fakes.proxied import installed, running_proxy, welcomed
from tests.fakes.seconds import Seconds
from tests.fakes.served_relay import ServedRelay
from tests.fakes.server_ca import SimulatedServerCa, server_key_named
from tests.fakes.serving import Server

pytestmark = pytest.mark.integration

CONFIGURATION = Path(__file__).parents[3] / "docs" / "proxies" / "nginx.conf"
NAME, HERE, CLIENT = "relay.example", "127.0.0.1", "127.0.0.2"
BOUND_S = 30
MAIN = """
daemon off;
master_process off;
pid {directory}/pid;
error_log {directory}/errors;
events {{ worker_connections 256; }}
http {{
    access_log off;
    client_body_temp_path {directory}/body;
    proxy_temp_path {directory}/proxy;
    fastcgi_temp_path {directory}/fastcgi;
    uwsgi_temp_path {directory}/uwsgi;
    scgi_temp_path {directory}/scgi;
    include {directory}/relay.conf;
}}
"""


@dataclass(frozen=True)
class Proxied:
    """A relay behind nginx, its meter, the port of nginx, and the root of its certificate."""

    relay: ServedRelay
    meter: RequestMeter
    port: int
    root: str

    async def ask(self, path: str, *lines: str) -> bytes:
        """Return what nginx answers a client of another address than its own."""
        async with asyncio.timeout(BOUND_S):
            reader, writer = await asyncio.open_connection(
                HERE,
                self.port,
                ssl=client_context(self.root),
                server_hostname=NAME,
                local_addr=(CLIENT, 0),
            )
            head = [f"GET {path} HTTP/1.1", f"Host: {NAME}", "Connection: close", *lines, "", ""]
            writer.write("\r\n".join(head).encode())
            answer = await reader.read()
        writer.close()
        return answer


@pytest.fixture
async def proxied(tmp_path: Path, registry: SchemaRegistry) -> AsyncIterator[Proxied]:
    servers = SimulatedServerCa("root of servers", time.time_ns() // 1_000_000)
    key, port = server_key_named("nginx"), unused_port()
    (tmp_path / "cert.pem").write_text(servers.issue("nginx", [NAME, HERE], key.public_key()))
    private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    (tmp_path / "key.pem").write_bytes(private)
    async with AsyncExitStack() as stack:
        hub = Hub(tmp_path / "relay", registry)
        stack.callback(hub.close)
        server = await stack.enter_async_context(
            Server.running(proxies=TrustedProxies([ip_network(f"{HERE}/32")]))
        )
        relay = await stack.enter_async_context(ServedRelay.open(hub, server))
        text = CONFIGURATION.read_text("utf-8")
        for old, new in (
            ("server 127.0.0.1:8700;", f"server {relay.address};"),
            ("listen 443 ssl;", f"listen {HERE}:{port} ssl;"),
            ("/etc/nginx/relay.example.pem", str(tmp_path / "cert.pem")),
            ("/etc/nginx/relay.example.key", str(tmp_path / "key.pem")),
        ):
            assert old in text
            text = text.replace(old, new)
        (tmp_path / "relay.conf").write_text(text)
        main = tmp_path / "nginx.conf"
        main.write_text(MAIN.format(directory=tmp_path))
        command = [installed("nginx"), "-p", str(tmp_path), "-e", str(tmp_path / "errors"), "-c", str(main)]
        await stack.enter_async_context(running_proxy(command, port))
        server.connections.meter = meter = RequestMeter(monotonic=Seconds())
        yield Proxied(relay, meter, port, servers.root_pem)


@pytest.mark.parametrize("era", [NEW, OLD])
async def test_agents_of_both_eras_are_served(proxied: Proxied, era: str) -> None:
    tls, token = client_context(proxied.root), proxied.relay.hub.token()
    async with McpWire.open(HostPort(HERE, proxied.port), era, token, tls=tls, name=NAME) as wire:
        answer = await wire.ask(wire.request("sysecho.nowhere.echo.invoke", {}))
        assert answer["result"]["isError"] is True


async def test_events_pass_as_they_come(proxied: Proxied) -> None:
    tls, token = client_context(proxied.root), proxied.relay.hub.token()
    async with (
        McpWire.open(HostPort(HERE, proxied.port), OLD, token, tls=tls, name=NAME) as wire,
        wire.event_stream() as lines,
        asyncio.timeout(BOUND_S),
    ):
        proxied.relay.hub.connect(proxied.relay.hub.ca.issue())
        async for line in lines:
            if "notifications/tools/list_changed" in line:
                break


async def test_a_node_has_a_session(proxied: Proxied) -> None:
    await welcomed(proxied.relay.hub, proxied.port, client_context(proxied.root))


async def test_the_relay_knows_the_address_of_the_client_whatever_that_writes(proxied: Proxied) -> None:
    answer = await proxied.ask("/mcp", "Authorization: Bearer x", "X-Forwarded-For: 203.0.113.7, 127.0.0.1")
    assert answer.startswith(b"HTTP/1.1 401 ")
    assert proxied.relay.refusals() == [("token_refused", CLIENT, "malformed", 1)]


async def test_metrics_and_names_of_loopback_are_for_no_one_behind_it(proxied: Proxied) -> None:
    assert (await proxied.ask("/metrics")).startswith(b"HTTP/1.1 404 ")
    answer = await proxied.ask("/metrics", f"X-Forwarded-Host: {proxied.relay.address}")
    assert answer.startswith(b"HTTP/1.1 404 ")


async def test_a_client_over_its_rate_is_refused(proxied: Proxied) -> None:
    source = RequestSource.of_group(None)  # of loopback, as the client of this test
    while proxied.meter.take(source, Share.REQUESTS, 1):
        pass
    assert (await proxied.ask("/schemas/")).startswith(b"HTTP/1.1 429 ")
    assert (await proxied.ask("/healthz")).startswith(b"HTTP/1.1 200 ")
