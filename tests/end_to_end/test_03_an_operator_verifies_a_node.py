"""3. An operator verifies what the node announces.

Steps: read the node's loopback · read the broker · verify the manifest by the command line · read the
resources that an agent can verify · read health, readiness, schemas and metrics of the relay.
"""

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import httpx2
import pytest
from mcp.shared.exceptions import MCPError

from schemas.addresses import parse_broker
from schemas.canonical import blake3_hex
from tests.fakes.demo import Demo
from tests.fakes.metrics_client import metrics_client
from tests.fakes.mqtt_listener import MqttListener
from tests.fakes.shipped_kinds import LINUX


async def retained(demo: Demo, topic: str) -> bytes:
    """Return what the broker holds on ``topic``."""
    listener = MqttListener(parse_broker(demo.facts["broker"]), topic)
    async with listener.listening():
        return (await listener.next()).payload


def run(command: list[str]) -> subprocess.CompletedProcess[str]:
    variables = {**os.environ, "KUBELET_KINDS": ",".join(LINUX)}
    return subprocess.run(command, check=False, capture_output=True, text=True, timeout=30, env=variables)


@pytest.mark.holds("RFC-0001/1/retained-announce", "RFC-0001/1/etag")
async def test_the_loopback_shows_the_very_bytes_that_the_broker_holds(demo: Demo) -> None:
    async with httpx2.AsyncClient() as http:
        shown = await http.get(demo.facts["loopback_url"] + "/.well-known/mcp.json")
    assert shown.status_code == 200
    assert shown.headers["etag"] == f'"{blake3_hex(shown.content)}"'
    assert shown.content == await retained(demo, f"$devices/{demo.real_node}/announce")


async def test_anyone_with_the_root_can_verify_what_the_broker_holds(demo: Demo, tmp_path: Path) -> None:
    manifest, identity = tmp_path / "manifest.json", tmp_path / "identity.pem"
    manifest.write_bytes(await retained(demo, f"$devices/{demo.real_node}/announce"))
    identity.write_bytes(await retained(demo, f"$devices/{demo.real_node}/identity"))
    command = [sys.executable, "-P", "-m", "kubelet", "verify", str(manifest)]
    command += ["--root", demo.facts["ca_root"], "--identity", str(identity)]
    good = await asyncio.to_thread(run, command)
    assert good.returncode == 0, good.stderr
    assert demo.real_node in good.stdout

    manifest.write_bytes(manifest.read_bytes().replace(b'"rate_limit_rps":10', b'"rate_limit_rps":11'))
    bad = await asyncio.to_thread(run, command)
    assert bad.returncode == 1
    assert bad.stderr == "kubelet: not valid: signature\n"


async def test_an_agent_can_read_what_it_needs_to_verify_for_itself(demo: Demo) -> None:
    async with demo.client() as client:
        uris = {resource.uri for resource in (await client.list_resources()).resources}
        assert f"node://{demo.real_node}/manifest" in uris
        [manifest] = (await client.read_resource(f"node://{demo.real_node}/manifest")).contents
        announced = await retained(demo, f"$devices/{demo.real_node}/announce")
        assert getattr(manifest, "text", "").encode("utf-8") == announced
        with pytest.raises(MCPError, match="Resource not found"):
            await client.read_resource("node://01hzx9k3m4p7q8r9s0t1v2w3xy/manifest")


async def test_the_relay_says_how_it_is(demo: Demo) -> None:
    async with httpx2.AsyncClient(base_url=demo.base_url) as http:
        assert (await http.get("/healthz")).json() == {"status": "ok"}
        ready = await http.get("/readyz")
        names = {"broker", "inventory", "calls", "audit", "revocations", "decisions", "clock"}
        assert (ready.status_code, ready.json()["subsystems"].keys()) == (200, names)
        subsystems = ready.json()["subsystems"].values()
        assert all(health["started"] and health["live"] and health["ready"] for health in subsystems)
        assert (await http.get("/metrics")).status_code == 404
    async with metrics_client(demo.metrics) as http:
        metrics = (await http.get("/metrics")).text
    assert "edge_relay_nodes_connected 3.0" in metrics
    assert 'edge_relay_manifests_total{outcome="accepted"' in metrics


async def test_the_node_says_how_it_is(demo: Demo) -> None:
    async with httpx2.AsyncClient(base_url=demo.facts["loopback_url"]) as http:
        assert (await http.get("/healthz")).status_code == 200
        ready = await http.get("/readyz")
        assert ready.status_code == 200
        subsystems = ready.json()["subsystems"]
        # What was dropped or refused may follow: a client that ends in the middle of a line is counted.
        tools = subsystems["caller tools"]["state"]
        assert tools.startswith("0 sessions, 0 local clients"), tools
        assert {name: health["state"] for name, health in subsystems.items()} == {
            "identity": "issued",
            "manifest": "signed",
            "broker": "connected",
            "relay": "announced",
            "calls": "calls flow",
            "caller tools": tools,
        }
        assert all(health["started"] and health["live"] and health["ready"] for health in subsystems.values())
        assert (await http.post("/.well-known/mcp.json")).status_code == 405
        rebound = await http.get("/.well-known/mcp.json", headers={"Host": "attacker.example"})
    assert rebound.status_code == 421


@pytest.mark.holds("RFC-0001/decision-5/schemas")
async def test_schemas_are_public_and_immutable(demo: Demo) -> None:
    async with httpx2.AsyncClient(base_url=demo.base_url) as http:
        refs = (await http.get("/schemas/")).json()["schemas"]
        assert {"manifest@1.0.0", "manifest@1.1.0", "system.metrics@1.0.0", "error@1.0.0"} <= set(refs)
        for ref in refs:
            document = await http.get(f"/schemas/{ref}")
            assert document.json()["$id"] == f"mcp://schemas/{ref}"
            assert "immutable" in document.headers["cache-control"]
        again = await http.get(f"/schemas/{ref}", headers={"If-None-Match": document.headers["etag"]})
        assert (again.status_code, again.content) == (304, b"")
        for trick in ("/schemas/%2e%2e%2fetc%2fpasswd", "/schemas/error@1.0.0.json", "/schemas/error"):
            assert (await http.get(trick)).status_code == 404
