"""Attacker: node A, or any client that can publish. Tried: B's heartbeat on A's topic, A's on B's, and
telemetry.

What must happen: a heartbeat whose topic and id disagree counts for no node; one that agrees informs and
moves no expiry; the relay never subscribes to telemetry: it takes samples from sessions alone.
"""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from schemas import topics
from schemas.addresses import BrokerAddress
from schemas.manifest import etag_of
from schemas.registry import SchemaRegistry
from tests.fakes.broker import publish
from tests.fakes.feed import WatchedFleet, subscribed
from tests.fakes.hub import Hub
from tests.fakes.refusals import audited_refusals, manifest_in_force, metrics_of
from tests.fakes.signer import NODE_ID, NOW_MS, OTHER_NODE_ID, TTL_MS, SimulatedNode


@pytest.fixture
def hub(tmp_path: Path, registry: SchemaRegistry) -> Iterator[Hub]:
    hub = Hub(tmp_path, registry, fleet_type=WatchedFleet)
    yield hub
    hub.close()


def beat(node_id: str, etag: str) -> bytes:
    members = {
        "node_id": node_id,
        "ts_ms": NOW_MS,
        "seq": 1,
        "manifest_etag": etag,
        "expires_at_ms": NOW_MS + 86_400_000,
    }
    return json.dumps(members).encode()


async def listen(hub: Hub, broker: BrokerAddress, *messages: tuple[str, bytes]) -> None:
    """Let the relay hear ``messages``, and B's own heartbeat after them."""
    assert isinstance(hub.fleet, WatchedFleet)
    last = (topics.heartbeat(NODE_ID), beat(NODE_ID, "00" * 32))
    async with subscribed(hub, broker):
        await hub.lines.until("broker connected")
        await asyncio.to_thread(publish, broker, *messages, last, retain=False)
        # What the broker passed on before it was dealt with before it.
        await hub.fleet.until("heartbeat", NODE_ID)


def in_anothers_name(etag: str) -> list[tuple[str, bytes]]:
    return [
        (topics.heartbeat(OTHER_NODE_ID), beat(NODE_ID, etag)),
        (topics.heartbeat(NODE_ID), beat(OTHER_NODE_ID, etag)),
        (topics.heartbeat(NODE_ID), beat(NODE_ID.upper(), etag)),
        (topics.heartbeat(NODE_ID), beat("", etag)),
    ]


async def test_it_counts_for_no_node_and_is_said_in_the_audit(
    hub: Hub, node: SimulatedNode, broker: BrokerAddress
) -> None:
    good = hub.connect(node)
    await listen(hub, broker, *in_anothers_name(etag_of(good)))
    assert hub.counted("heartbeats_total", verdict="malformed") == 4
    assert hub.counted("heartbeats_total", verdict="fits") == 0
    # The last one was the node's own, of a manifest that the relay does not know.
    assert hub.counted("heartbeats_total", verdict="unknown_manifest") == 1
    counts = {line["source"]: line["count"] for line in audited_refusals(hub)}
    assert counts == {OTHER_NODE_ID: 1, NODE_ID: 3}


async def test_a_heartbeat_moves_no_expiry_and_restores_no_node(hub: Hub, node: SimulatedNode) -> None:
    good = hub.connect(node)
    hub.clock.advance(TTL_MS - 1)
    hub.fleet.inventory.heartbeat(NODE_ID, etag_of(good))
    (known,) = hub.nodes_of(node.tenant)
    assert known.is_listed(hub.clock())
    hub.clock.advance(1)
    hub.fleet.inventory.heartbeat(NODE_ID, etag_of(good))
    assert not known.is_listed(hub.clock())


async def test_the_relay_does_not_subscribe_to_telemetry(
    hub: Hub, node: SimulatedNode, broker: BrokerAddress
) -> None:
    good = hub.connect(node)
    sample = json.dumps({"ts_ms": NOW_MS, "node_id": OTHER_NODE_ID, "uptime_s": 1}).encode()
    await listen(hub, broker, (f"$devices/{NODE_ID}/telemetry", sample))
    assert hub.counted("messages_dropped_total") == 0
    assert manifest_in_force(hub, node) == good
    assert audited_refusals(hub) == []
    assert metrics_of(node) not in hub.audit_file.read_text("ascii")
