"""Attacker: the holder of a copy of a node's SD card. Tried: to be the node beside the node.

What must happen: the newer session is kept; the older is closed with 4008; both ends flag it, the older waits
five minutes, and a command goes to one of them only.
"""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from kubelet.session.link import LinkState
from schemas.registry import SchemaRegistry
from tests.fakes.hub import Hub
from tests.fakes.linked_node import LinkedNode
from tests.fakes.node_end import OTHER_BOOT_ID
from tests.fakes.served_relay import ServedRelay
from tests.fakes.serving import Server
from tests.fakes.signer import NODE_ID, NOW_MS, SimulatedNode

pytestmark = pytest.mark.asyncio(loop_scope="module")

RESULT = {"message": "ping", "received_at_ms": NOW_MS, "node_id": NODE_ID}


@pytest_asyncio.fixture(loop_scope="module")
async def relay(tmp_path: Path, registry: SchemaRegistry, server: Server) -> AsyncIterator[ServedRelay]:
    """A relay whose public URL is where it is served, so that real nodes find it."""
    hub = Hub(tmp_path, registry, public_url=f"http://{server.address}")
    async with ServedRelay.open(hub, server) as relay:
        yield relay
    hub.close()


@pytest.fixture
def node(relay: ServedRelay) -> SimulatedNode:
    return relay.hub.ca.issue()


async def test_the_older_machine_is_closed_and_both_ends_flag_it(
    relay: ServedRelay, node: SimulatedNode, registry: SchemaRegistry
) -> None:
    url = relay.hub.public_url
    async with LinkedNode.running(node, url, registry) as owner:
        await owner.until(LinkState.ANNOUNCED)
        async with LinkedNode.running(node, url, registry) as thief:
            await owner.until(LinkState.SUPERSEDED)
            assert (await owner.waits.next()).seconds >= 300
            await thief.until(LinkState.ANNOUNCED)
        line = owner.log.entries("relay closed the session")[0]
        assert (line["code"], line["what"]) == (4008, "another machine uses this identity")
    (flagged,) = relay.hub.lines.entries("two machines use one identity; the newer stays")
    assert flagged["node_id"] == NODE_ID
    assert relay.hub.counted("sessions_total", event="duplicate_identity") == 1


async def test_a_command_goes_to_the_newer_machine_only_and_the_audit_has_both(
    relay: ServedRelay, node: SimulatedNode
) -> None:
    async with relay.session(node) as older, relay.session(node, OTHER_BOOT_ID) as newer:
        call = asyncio.create_task(relay.call(f"sysecho.{NODE_ID}.echo.invoke"))
        await newer.acknowledge(await newer.receive("cmd"), RESULT)
        assert (await call).json()["result"]["structuredContent"] == RESULT
        code, frames = await older.until_closed()
        assert (code, [frame.type for frame in frames]) == (4008, ["bye"])
        assert [(source, count) for _, source, _, count in relay.refusals()] == [(NODE_ID, 1)]
    assert relay.calls() == [("allow", "ok", NODE_ID), ("ok", "ok", NODE_ID)]
