import asyncio
import json
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from relay.auth.permissions import Rights
from relay.fleet.fleet import GRACE_MS, Fleet
from relay.fleet.inventory import Inventory
from relay.fleet.missing_manifests import WINDOW_MS
from relay.fleet.mqtt_feed import MqttFeed
from relay.limits.rate_limits import Allowance
from relay.pki.broker_access import BrokerAccess
from schemas import topics
from schemas.addresses import BrokerAddress
from schemas.manifest import MAX_MANIFEST_BYTES, etag_of
from schemas.process.logs import make_logger
from schemas.registry import SchemaRegistry
from schemas.verdicts import Verdict
from tests.fakes.broker import Broker, publish
from tests.fakes.callers import call_of
from tests.fakes.hub import Hub
from tests.fakes.lines import LogLines
from tests.fakes.pauses import Pauses
from tests.fakes.polling import until
from tests.fakes.ports import unused_port
from tests.fakes.seconds import Seconds
from tests.fakes.signer import NODE_ID, NOW_MS, OTHER_NODE_ID, TENANT, SimulatedNode
from tests.fakes.tls_broker import PlayedAuthority, TlsBroker

pytestmark = pytest.mark.integration

BOUND_S = 30
READERS = Rights(TENANT, frozenset({"read_only"}))
SHORT = "the broker has not sent all manifests that were known; see docs/brokers.md"
READERS = Rights(TENANT, frozenset({"read_only"}))
MISSING = "manifests are missing: does the broker hold back retained messages? see docs/brokers.md"


class WatchedFleet(Fleet):
    """A fleet that tells what was handed to it, after it has dealt with it, and in which ``turn``."""

    def __init__(self, **parts: Any) -> None:
        super().__init__(**parts)
        self.handed: asyncio.Queue[tuple[str, str]] = asyncio.Queue()
        self.inventory.heartbeat = self._heartbeat  # type: ignore[method-assign]  # to learn of each
        self.turn = 0
        self.turns: list[int] = []

    def offer_identity(self, node_id: str, pem: str) -> None:
        super().offer_identity(node_id, pem)
        self.handed.put_nowait(("identity", node_id))

    def offer_manifest(
        self, node_id: str, wire: bytes, way: str, parsed: Mapping[str, Any] | None = None
    ) -> Verdict:
        self.turns.append(self.turn)
        verdict = super().offer_manifest(node_id, wire, way, parsed)
        self.handed.put_nowait((verdict.outcome.value, node_id))
        return verdict

    def _heartbeat(self, node_id: str, etag: str) -> None:
        Inventory.heartbeat(self.inventory, node_id, etag)
        self.handed.put_nowait(("heartbeat", node_id))

    def tombstone(self, node_id: str) -> None:
        super().tombstone(node_id)
        self.handed.put_nowait(("tombstone", node_id))


class Stage:
    """A relay's subscription, and what comes of it."""

    def __init__(self, hub: Hub) -> None:
        self.hub = hub
        self.node = hub.ca.issue()

    @property
    def fleet(self) -> WatchedFleet:
        assert isinstance(self.hub.fleet, WatchedFleet)
        return self.hub.fleet

    async def next(self) -> tuple[str, str]:
        return await asyncio.wait_for(self.fleet.handed.get(), BOUND_S)

    async def until(self, event: str, node_id: str = NODE_ID) -> None:
        while await self.next() != (event, node_id):
            pass

    @asynccontextmanager
    async def subscribed(self, address: BrokerAddress, **parts: Any) -> AsyncIterator[MqttFeed]:
        feed = MqttFeed(
            broker=address,
            client_id="edge-relay-test",
            fleet=self.hub.fleet,
            registry=self.hub.registry,
            metrics=self.hub.metrics,
            refusals=self.hub.refusals,
            log=self.hub.log,
            # Not doubled: a broker that takes seconds to start would be found after 15 s or 31 s.
            longest_wait_s=1,
            **parts,
        )
        running = asyncio.create_task(feed.run())
        try:
            yield feed
            assert not running.done()
        finally:
            running.cancel()
            with suppress(asyncio.CancelledError):
                await running


@pytest.fixture
def stage(tmp_path: Path, registry: SchemaRegistry) -> Iterator[Stage]:
    hub = Hub(tmp_path, registry, fleet_type=WatchedFleet)
    yield Stage(hub)
    hub.close()


def introduction(node: SimulatedNode) -> list[tuple[str, bytes]]:
    return [
        (topics.identity(node.node_id), node.leaf_pem.encode()),
        (topics.announce(node.node_id), node.manifest()),
    ]


def beat(node: SimulatedNode, **members: object) -> bytes:
    good = {
        "node_id": node.node_id,
        "ts_ms": NOW_MS,
        "seq": 1,
        "manifest_etag": etag_of(node.manifest()),
        "expires_at_ms": NOW_MS + 60_000,
    }
    return json.dumps(good | members).encode()


async def send(address: BrokerAddress, *messages: tuple[str, bytes], retain: bool = True) -> None:
    await asyncio.to_thread(publish, address, *messages, retain=retain)


def announced(stage: Stage) -> list[str]:
    return [node.node_id for node in stage.hub.fleet.nodes_of(TENANT) if node.manifest is not None]


async def test_nodes_that_announced_themselves_before_are_found(stage: Stage, broker: BrokerAddress) -> None:
    other = stage.hub.ca.issue(OTHER_NODE_ID)
    await send(broker, *introduction(stage.node), *introduction(other))
    async with stage.subscribed(broker):
        expected = {("accepted", NODE_ID), ("accepted", OTHER_NODE_ID)}
        while expected:
            expected.discard(await stage.next())
        assert announced(stage) == [NODE_ID, OTHER_NODE_ID]


async def test_after_a_restart_the_nodes_that_are_retained_are_listed_and_offline(
    stage: Stage, broker: BrokerAddress
) -> None:
    hub = stage.hub
    gateway, name = hub.gateway(hub.sessions()), f"sysecho.{NODE_ID}.echo.invoke"
    await send(broker, *introduction(stage.node))
    async with stage.subscribed(broker):
        await stage.until("accepted")
        assert name in [tool.canonical for tool in hub.fleet.selected.listed(READERS)]
        answer = await gateway.call(call_of(hub.token(), name, {"message": "ping"}))
        assert answer.error is not None
        assert answer.error["code"] == "E_NODE_OFFLINE"
        hub.clock.advance(GRACE_MS)
        assert hub.fleet.selected.listed(READERS) == []


async def test_a_node_that_comes_later_is_found_whichever_of_its_messages_is_first(
    stage: Stage, broker: BrokerAddress
) -> None:
    async with stage.subscribed(broker):
        await stage.hub.lines.until("broker connected")
        identity, announce = introduction(stage.node)
        await send(broker, announce)
        await stage.until("parked")
        assert announced(stage) == []
        await send(broker, identity)
        await stage.until("accepted")
        assert announced(stage) == [NODE_ID]


async def test_a_tombstone_takes_a_node_away(stage: Stage, broker: BrokerAddress) -> None:
    async with stage.subscribed(broker):
        await stage.hub.lines.until("broker connected")
        await send(broker, *introduction(stage.node))
        await stage.until("accepted")
        await send(broker, (topics.announce(NODE_ID), b""), (topics.identity(NODE_ID), b""))
        await stage.until("tombstone")
        assert announced(stage) == []


async def test_heartbeats_are_counted_by_whether_they_fit(stage: Stage, broker: BrokerAddress) -> None:
    topic = topics.heartbeat(NODE_ID)
    bad = [b"", b"{", b"null", beat(stage.node, node_id=OTHER_NODE_ID), beat(stage.node, more=1)]
    async with stage.subscribed(broker):
        await stage.hub.lines.until("broker connected")
        await send(broker, *introduction(stage.node))
        await stage.until("accepted")
        messages = [(topic, payload) for payload in (*bad, beat(stage.node, manifest_etag="00" * 32))]
        await send(broker, *messages, (topic, beat(stage.node)), retain=False)
        await stage.until("heartbeat")
        await stage.until("heartbeat")
    verdicts = {
        verdict: stage.hub.counted("heartbeats_total", verdict=verdict)
        for verdict in ("fits", "unknown_manifest", "malformed")
    }
    assert verdicts == {"fits": 1, "unknown_manifest": 1, "malformed": len(bad)}


@pytest.mark.parametrize(
    ("topic", "payload", "reason"),
    [
        pytest.param("$devices/unknown/announce", b"{}", "topic", id="no node id"),
        pytest.param(f"$devices/{NODE_ID.upper()}/announce", b"{}", "topic", id="upper case"),
        pytest.param(
            topics.announce(OTHER_NODE_ID), b"x" * (MAX_MANIFEST_BYTES + 1), "size", id="enormous manifest"
        ),
        pytest.param(topics.identity(OTHER_NODE_ID), b"x" * 20_000, "size", id="enormous identity"),
        pytest.param(topics.heartbeat(OTHER_NODE_ID), b"x" * 2000, "size", id="enormous heartbeat"),
    ],
)
async def test_what_cannot_be_meant_for_the_relay_is_dropped_unread_and_the_rest_goes_on(
    stage: Stage, broker: BrokerAddress, topic: str, payload: bytes, reason: str
) -> None:
    async with stage.subscribed(broker):
        await stage.hub.lines.until("broker connected")
        await send(broker, (topic, payload), *introduction(stage.node))
        await stage.until("accepted")
        # nats-server keeps the order within each subscription only.
        await until(lambda: stage.hub.counted("messages_dropped_total", reason=reason) == 1)
        assert announced(stage) == [NODE_ID]


@pytest.mark.parametrize("payload", [b"\x00\xff", b"-----BEGIN CERTIFICATE-----\xff", b"{}"])
async def test_garbage_on_the_topics_of_one_node_costs_the_others_nothing(
    stage: Stage, broker: BrokerAddress, payload: bytes
) -> None:
    async with stage.subscribed(broker):
        await stage.hub.lines.until("broker connected")
        garbage = [(topic(OTHER_NODE_ID), payload) for topic in (topics.identity, topics.announce)]
        await send(broker, *garbage, *introduction(stage.node))
        await stage.until("accepted")
        assert announced(stage) == [NODE_ID]
        assert stage.hub.counted("identities_total", verdict="bad_certificate") == 1


async def test_a_message_that_brings_out_a_bug_does_not_end_the_relay(
    stage: Stage, broker: BrokerAddress, monkeypatch: pytest.MonkeyPatch
) -> None:
    tombstone = stage.hub.fleet.tombstone

    def broken(node_id: str) -> None:
        tombstone(node_id)
        raise RuntimeError("\x1b[31m" + "c2VjcmV0" * 8)

    monkeypatch.setattr(stage.hub.fleet, "tombstone", broken)
    async with stage.subscribed(broker):
        await stage.hub.lines.until("broker connected")
        await send(broker, (topics.announce(OTHER_NODE_ID), b""), *introduction(stage.node), retain=False)
        await stage.until("accepted")
        line = await stage.hub.lines.until("message not understood")
    assert line["error"] == r"RuntimeError: \x1b[(left out)"
    assert "in broken" in line["exception"]
    assert "c2VjcmV0" * 8 not in json.dumps(line)
    assert stage.hub.counted("messages_dropped_total", reason="internal") == 1


async def test_a_manifest_on_another_nodes_topic_is_rejected(stage: Stage, broker: BrokerAddress) -> None:
    async with stage.subscribed(broker):
        await stage.hub.lines.until("broker connected")
        await send(broker, (topics.announce(OTHER_NODE_ID), stage.node.manifest()))
        await stage.until("rejected", OTHER_NODE_ID)
        assert stage.hub.counted("manifests_total", reason="id_mismatch") == 1


async def test_a_fleet_of_more_nodes_than_brokers_queue_by_default_is_found_whole(
    stage: Stage, broker: BrokerAddress
) -> None:
    count = 1500
    nodes = [f"{number:026d}" for number in range(count)]
    await send(broker, *((topics.announce(node_id), b"{}") for node_id in nodes))
    async with stage.subscribed(broker):
        seen = {await stage.next() for _ in range(count)}
    assert seen == {("rejected", node_id) for node_id in nodes}


async def test_nodes_that_are_not_known_have_one_common_pace_and_lose_nothing(
    stage: Stage, broker: BrokerAddress
) -> None:
    strangers = [f"{number:026d}" for number in range(4)]
    pauses, seconds = Pauses(), Seconds()
    allowance = Allowance(rate=2, burst=2.5, concurrency=1)
    async with stage.subscribed(broker, unknown_nodes=allowance, monotonic=seconds, sleep=pauses.sleep):
        await stage.hub.lines.until("broker connected")
        await send(broker, *((topics.announce(node_id), b"{}") for node_id in strangers), retain=False)
        assert [await stage.next() for _ in range(2)] == [("rejected", each) for each in strangers[:2]]
        for node_id in strangers[2:]:
            pause = await pauses.next()
            assert 0.25 <= pause.seconds < 0.51
            assert stage.fleet.handed.empty()
            seconds.now += pause.seconds
            pause.end()
            assert await stage.next() == ("rejected", node_id)


async def test_a_node_that_is_known_pays_nothing_into_the_strangers_pace(
    stage: Stage, broker: BrokerAddress
) -> None:
    allowance = Allowance(rate=1, burst=1.5, concurrency=1)
    stage.hub.announce(stage.node)
    while not stage.fleet.handed.empty():
        await stage.next()
    async with stage.subscribed(broker, unknown_nodes=allowance, monotonic=Seconds(), sleep=Pauses().sleep):
        await stage.hub.lines.until("broker connected")
        topic = topics.announce(NODE_ID)
        newer = [(topic, stage.node.manifest(issued_at_ms=NOW_MS + at)) for at in range(1, 10)]
        await send(broker, *newer, retain=False)
        assert [await stage.next() for _ in newer] == [("accepted", NODE_ID)] * len(newer)


async def test_between_two_large_messages_others_have_their_turn(stage: Stage, broker: BrokerAddress) -> None:
    large = b"{" + b" " * 120_000

    async def take_turns() -> None:
        while True:
            stage.fleet.turn += 1
            await asyncio.sleep(0)

    await send(broker, *((topics.announce(f"{number:026d}"), large) for number in range(20)))
    taking = asyncio.create_task(take_turns())
    async with stage.subscribed(broker):
        for _ in range(20):
            await stage.next()
    taking.cancel()
    assert len(set(stage.fleet.turns)) == 20


async def test_what_was_retained_before_the_broker_was_stopped_is_found_after_it(
    stage: Stage, stoppable_broker: Broker
) -> None:
    await send(stoppable_broker.address, *introduction(stage.node))
    await asyncio.to_thread(stoppable_broker.stop)
    await asyncio.to_thread(stoppable_broker.start)
    async with stage.subscribed(stoppable_broker.address):
        await stage.until("accepted")


async def test_a_broker_that_lost_all_it_retained_delists_no_connected_node_and_has_it_with_its_next_announce(
    stage: Stage, stoppable_broker: Broker
) -> None:
    address, fleet = stoppable_broker.address, stage.fleet
    await send(address, *introduction(stage.node))
    async with stage.subscribed(address):
        await stage.until("accepted")
        fleet.set_connected(NODE_ID, connected=True)
        before = fleet.selected.version(READERS)
        await asyncio.to_thread(stoppable_broker.stop)
        await stage.hub.lines.until("broker lost")
        await asyncio.to_thread(stoppable_broker.lose_all)
        await asyncio.to_thread(stoppable_broker.start)
        await stage.hub.lines.until("broker connected", 2)
        assert stage.hub.counted("inventory_missing") == 1
        stage.hub.clock.advance(60_000)  # a heartbeat later, and longer than a grace
        fleet.sweep()
        assert fleet.selected.version(READERS) == before
        renewed = stage.node.manifest(issued_at_ms=stage.hub.clock())
        await send(address, (topics.announce(NODE_ID), renewed))
        await stage.until("accepted")
        assert stage.hub.counted("inventory_missing") == 0
        assert fleet.selected.version(READERS) == before
    async with stage.subscribed(address):
        await stage.until("unchanged")  # the broker has it again


async def test_a_broker_that_was_never_reached_is_logged_once_for_each_reason(stage: Stage) -> None:
    nowhere = BrokerAddress("127.0.0.1", unused_port())
    async with stage.subscribed(nowhere):
        await stage.hub.lines.until("broker not reached")
    [line] = stage.hub.lines.entries("broker not reached")
    assert (line["level"], line["broker"], line["reason"]) == ("warning", str(nowhere), "Connection refused")


async def test_a_clean_stop_is_no_loss_of_the_broker(stage: Stage, broker: BrokerAddress) -> None:
    async with stage.subscribed(broker):
        await stage.hub.lines.until("broker connected")
    assert stage.hub.lines.entries("broker lost") == []


async def test_manifests_that_the_broker_does_not_send_are_noticed_against_the_marks(
    stage: Stage, broker: BrokerAddress
) -> None:
    # Both have announced themselves before; of one, the broker lost what it retained.
    for node in (stage.node, stage.hub.ca.issue(OTHER_NODE_ID)):
        stage.hub.announce(node)
    await send(broker, *introduction(stage.node))
    async with stage.subscribed(broker, resubscribe_after_s=0.1, check_after_s=0.5):
        await stage.hub.lines.until(SHORT)
    [line] = stage.hub.lines.entries(SHORT)
    assert (line["level"], line["missing"], line["known"]) == ("warning", 1, 2)
    assert stage.hub.counted("inventory_missing") == 1


# nats-server may answer the first subscription or not, which is what the second is for.
@pytest.mark.parametrize("broker_kind", ["mosquitto"], indirect=True)
async def test_each_connection_subscribes_twice_to_what_is_retained(
    stage: Stage, stoppable_broker: Broker
) -> None:
    await send(stoppable_broker.address, *introduction(stage.node))
    async with stage.subscribed(stoppable_broker.address, resubscribe_after_s=0.1):
        await stage.until("accepted")
        await stage.until("unchanged")
        await asyncio.to_thread(stoppable_broker.stop)
        await stage.hub.lines.until("broker lost")
        await asyncio.to_thread(stoppable_broker.start)
        await stage.until("unchanged")
        await stage.until("unchanged")


async def test_heartbeats_tell_of_nodes_whose_manifests_the_broker_holds_back(
    stage: Stage, broker: BrokerAddress
) -> None:
    topic = topics.heartbeat(NODE_ID)
    async with stage.subscribed(broker):
        await stage.hub.lines.until("broker connected")
        await send(broker, (topic, beat(stage.node)), retain=False)
        await stage.until("heartbeat")
        stage.hub.clock.advance(WINDOW_MS)
        await send(broker, (topic, beat(stage.node)), retain=False)
        await stage.until("heartbeat")
    assert [line["nodes"] for line in stage.hub.lines.entries(MISSING)] == [1]


async def test_a_broker_that_goes_away_is_noticed_and_found_again(
    stage: Stage, stoppable_broker: Broker
) -> None:
    address = stoppable_broker.address
    async with stage.subscribed(address) as feed:
        await stage.hub.lines.until("broker connected")
        states = [feed.connected]
        await asyncio.to_thread(stoppable_broker.stop)
        await stage.hub.lines.until("broker lost")
        states.append(feed.connected)
        await asyncio.to_thread(stoppable_broker.start)
        await stage.hub.lines.until("broker connected", 2)
        states.append(feed.connected)
        assert states == [True, False, True]
        await send(address, *introduction(stage.node))
        await stage.until("accepted")


async def test_a_broker_that_comes_later_than_the_relay_is_found(
    stage: Stage, stoppable_broker: Broker
) -> None:
    await asyncio.to_thread(stoppable_broker.stop)
    async with stage.subscribed(stoppable_broker.address) as feed:
        assert not feed.connected
        await asyncio.to_thread(stoppable_broker.start)
        await stage.hub.lines.until("broker connected")
        assert feed.connected


async def test_a_broker_that_refuses_the_subscription_does_not_count_as_connected(
    stage: Stage, broker_kind: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    deaf = Broker(broker_kind, tmp_path_factory.mktemp("deaf"), deaf=True)
    await asyncio.to_thread(deaf.start)
    try:
        async with stage.subscribed(deaf.address) as feed:
            line = await stage.hub.lines.until("broker refuses the subscription")
            assert line["broker"] == str(deaf.address)
            assert not feed.connected
    finally:
        await asyncio.to_thread(deaf.stop)


async def test_nothing_is_left_behind(stage: Stage, broker: BrokerAddress) -> None:
    def connections() -> list[int]:
        found = psutil.Process().net_connections("tcp")
        return [each.fd for each in found if ("127.0.0.1", broker.port) == each.raddr]

    tasks = asyncio.all_tasks()
    async with stage.subscribed(broker):
        await stage.hub.lines.until("broker connected")
        assert connections()
    assert connections() == []
    assert asyncio.all_tasks() == tasks


# --- over TLS -----------------------------------------------------------------------------------------


async def test_over_tls_the_relay_listens_as_who_its_certificate_says(
    hub: Hub, broker_kind: str, tmp_path: Path
) -> None:
    authority = PlayedAuthority(tmp_path, time.time_ns() // 1_000_000)
    authority.nodes = {NODE_ID}
    broker = TlsBroker(broker_kind, tmp_path, authority.server("edge-broker"))
    BrokerAccess(authority, broker.edge, None, make_logger("relay", LogLines())).refresh()
    broker.start()
    feed = MqttFeed(
        broker=broker.address,
        client_id="edge-relay-test",
        fleet=hub.fleet,
        registry=hub.registry,
        metrics=hub.metrics,
        refusals=hub.refusals,
        log=hub.log,
        tls=authority.relay_context(),
    )
    running = asyncio.create_task(feed.run())
    try:
        await hub.lines.until("broker connected")
        assert feed.connected
    finally:
        running.cancel()
        with suppress(asyncio.CancelledError):
            await running
        broker.stop()
