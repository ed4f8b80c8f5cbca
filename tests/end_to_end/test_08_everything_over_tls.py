"""8. Everything is encrypted, and the broker identifies each client by certificate.

Steps: a certificate for the broker · the relay, which serves with its own · the broker · enrol a node and run
it · call it as an agent · read the broker as the relay does, and without a certificate · revoke the node.
"""

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import httpx2
import pytest

from relay.cli.demo.local_system import list_tools, until_listed
from schemas.tls import client_context
from tests.fakes.small_fleet import BOUND_S, SmallFleet, small_fleet
from tests.fakes.tls_broker import Peer, TlsBroker, until

pytestmark = pytest.mark.long


@dataclass(frozen=True)
class Site:
    """A relay, and a broker that is not its own; each command is one that an operator types."""

    fleet: SmallFleet
    broker: TlsBroker


@pytest.fixture
async def site(broker_kind: str, tmp_path: Path) -> AsyncIterator[Site]:
    async with small_fleet(tmp_path, secure=True, host="localhost") as fleet:
        files = fleet.state.broker
        files.mkdir(mode=0o700, exist_ok=True)
        (tmp_path / "edge").symlink_to(files)
        broker = TlsBroker(broker_kind, tmp_path)
        fleet.broker_port = broker.address.port
        await fleet.relay("ca", "issue-server", "localhost", "127.0.0.1", "--out", str(files))
        # The relay first: the broker does not start without its files, the generation last.
        address = f"mqtts://localhost:{broker.address.port}"
        await fleet.start_relay("--broker", address, "--broker-pid-file", str(broker.pid_file))
        async with asyncio.timeout(BOUND_S):
            while not (files / "generation").exists():
                fleet.processes.check()
                await asyncio.sleep(0.01)
        await asyncio.to_thread(broker.start)
        try:
            yield Site(fleet, broker)
        finally:
            await asyncio.to_thread(broker.stop)


async def test_a_node_is_called_announced_and_shut_out_and_nothing_travels_in_the_clear(site: Site) -> None:
    fleet, own = site.fleet, site.fleet.state.broker_client_tls
    node_id = (await fleet.enrol("node"))["node_id"]
    await fleet.start_node("node")
    name = f"sysecho.{node_id}.echo.invoke"
    async with fleet.agent() as client:
        async with asyncio.timeout(BOUND_S):
            await until_listed(client, {node_id}, fleet.processes.check)
        answer = await client.call_tool(name, {"message": "over TLS"})
        assert (answer.structured_content or {})["message"] == "over TLS"

        # The broker holds what the node announced, for the relay and for no other client.
        tls = client_context(fleet.roots(), (own.certificate, own.key))
        relay = await asyncio.to_thread(Peer, fleet.broker, tls)
        assert relay.subscribe(f"$devices/{node_id}/announce")
        topic, manifest = await asyncio.to_thread(relay.next)
        assert (topic, json.loads(manifest)["node_id"]) == (f"$devices/{node_id}/announce", node_id)
        stranger = await asyncio.to_thread(fleet.peer, None)
        assert not stranger.connected

        # Who does not believe the root says nothing to the relay, and who speaks in the clear hears nothing.
        async with httpx2.AsyncClient(verify=client_context()) as http:
            with pytest.raises(httpx2.ConnectError, match="certificate"):
                await http.get(fleet.url + "/readyz")
        async with httpx2.AsyncClient() as http:
            with pytest.raises(httpx2.HTTPError):
                await http.get(f"http://localhost:{fleet.port}/readyz")

        await fleet.relay("ca", "revoke", node_id)
        async with asyncio.timeout(BOUND_S):
            while name in {tool.name for tool in await list_tools(client)}:
                fleet.processes.check()
        refused = await client.call_tool(name, {"message": "still there?"})
        assert refused.is_error
    shut_out = await asyncio.to_thread(until, lambda: fleet.peer("node"), lambda peer: not peer.connected)
    assert relay.connected
    for peer in (relay, stranger, shut_out):
        peer.close()
