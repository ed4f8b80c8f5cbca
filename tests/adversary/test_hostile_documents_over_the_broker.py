"""Attacker: any client that can publish below ``$devices/``. Tried: every hostile document on every kind of
topic.

What must happen: each is counted and none is more: the relay stays subscribed, believes a node's own
manifest that comes after them, and says in the audit what it refused.
"""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from relay.limits.rate_limits import Allowance
from schemas import topics
from schemas.addresses import BrokerAddress
from schemas.registry import SchemaRegistry
from tests.fakes.broker import publish
from tests.fakes.documents import HOSTILE
from tests.fakes.feed import WatchedFleet, subscribed
from tests.fakes.hub import Hub
from tests.fakes.refusals import audited_refusals, manifest_in_force, refusal
from tests.fakes.signer import NODE_ID, SimulatedNode

BEAT = b'{"node_id":"%b"}' % NODE_ID.encode()
# A broker has a limit of its own, 132 KiB; what is between the two is for the relay to refuse.
DOCUMENTS = [spoil(BEAT)[: 131 * 1024] for spoil, _ in HOSTILE.values() if spoil(BEAT)]
# One topic of one node each: the relay takes only so much at once of any one node.
BEATING, IDENTIFIED, ANNOUNCED = (NODE_ID[:-1] + letter for letter in "abc")
VICTIMS = {topics.heartbeat: BEATING, topics.identity: IDENTIFIED, topics.announce: ANNOUNCED}
LARGE_HEARTBEATS = sum(len(document) > 1024 for document in DOCUMENTS)
LARGE_IDENTITIES = sum(len(document) > 16 * 1024 for document in DOCUMENTS)
LARGE_MANIFESTS = sum(len(document) > 128 * 1024 for document in DOCUMENTS)


@pytest.fixture
def hub(tmp_path: Path, registry: SchemaRegistry) -> Iterator[Hub]:
    hub = Hub(tmp_path, registry, fleet_type=WatchedFleet)
    yield hub
    hub.close()


async def test_no_hostile_document_stops_the_relay_from_listening(
    hub: Hub, node: SimulatedNode, broker: BrokerAddress
) -> None:
    assert isinstance(hub.fleet, WatchedFleet)
    per_node = Allowance(rate=1000, burst=1000, concurrency=1)
    async with subscribed(hub, broker, per_node=per_node):
        await hub.lines.until("broker connected")
        for topic_of, victim in VICTIMS.items():
            messages = [(topic_of(victim), document) for document in DOCUMENTS]
            await asyncio.to_thread(publish, broker, *messages, retain=False)
        good = node.manifest()
        own = [(topics.identity(NODE_ID), node.leaf_pem.encode()), (topics.announce(NODE_ID), good)]
        await asyncio.to_thread(publish, broker, *own, retain=False)
        await hub.fleet.until("accepted", NODE_ID)
    assert manifest_in_force(hub, node) == good
    counted = len(DOCUMENTS)
    assert hub.counted("heartbeats_total", verdict="malformed") == counted - LARGE_HEARTBEATS
    assert hub.counted("messages_dropped_total", reason="size") == (
        LARGE_HEARTBEATS + LARGE_IDENTITIES + LARGE_MANIFESTS
    )
    assert hub.counted("messages_dropped_total", reason="internal") == 0
    assert audited_refusals(hub) == [
        refusal("heartbeat_refused", BEATING, "malformed", counted - LARGE_HEARTBEATS),
        refusal("identity_refused", IDENTIFIED, "bad_certificate", counted - LARGE_IDENTITIES),
        refusal("manifest_refused", ANNOUNCED, "not_json", counted - LARGE_MANIFESTS),
    ]
