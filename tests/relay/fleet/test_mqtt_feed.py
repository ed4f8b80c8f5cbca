"""The feed from a broker, real and scripted: what reaches the fleet, in which order, and what is dropped."""

import asyncio
import json
import socket
import ssl
import threading
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from relay.auth.permissions import Rights
from relay.fleet.fleet import GRACE_MS
from relay.fleet.mqtt_feed import PAUSE_S, MqttConnection, MqttFeed, MqttMessage
from relay.fleet.node_record import Where
from relay.limits.rate_limits import Allowance
from relay.pki.broker_access import BrokerAccess
from schemas import topics
from schemas.addresses import BrokerAddress
from schemas.health import Loop
from schemas.manifest import MAX_MANIFEST_BYTES, etag_of
from schemas.process.logs import make_logger
from schemas.registry import SchemaRegistry
from tests.fakes.broker import Broker, publish
from tests.fakes.callers import call_of
from tests.fakes.feed import WatchedFleet, subscribed
from tests.fakes.hub import Hub
from tests.fakes.lines import LogLines
from tests.fakes.pauses import Pauses
from tests.fakes.played_broker import DISCONNECT, PINGREQ, SUBSCRIBE, BrokerEnd, PlayedBroker, publication
from tests.fakes.polling import until
from tests.fakes.ports import unused_port
from tests.fakes.seconds import Seconds
from tests.fakes.signer import NODE_ID, NOW_MS, OTHER_NODE_ID, TENANT, SimulatedNode
from tests.fakes.tls_broker import PlayedAuthority, TlsBroker

pytestmark = pytest.mark.integration

BOUND_S = 30
READERS = Rights(TENANT, frozenset({"read_only"}))
SHORT = "the broker has not sent all manifests that were known; see docs/brokers.md"


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
        await self.fleet.until(event, node_id)

    def subscribed(self, address: BrokerAddress, **parts: Any) -> AbstractAsyncContextManager[MqttFeed]:
        return subscribed(self.hub, address, **parts)

    @asynccontextmanager
    async def connected(self, address: BrokerAddress, **parts: Any) -> AsyncIterator[MqttFeed]:
        async with self.subscribed(address, **parts) as feed:
            await self.hub.lines.until("broker connected")
            yield feed


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
    return [node.node_id for node in stage.hub.nodes_of(TENANT) if node.manifest is not None]


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
    async with stage.connected(broker):
        identity, announce = introduction(stage.node)
        await send(broker, announce)
        await stage.until("parked")
        assert announced(stage) == []
        await send(broker, identity)
        await stage.until("accepted")
        assert announced(stage) == [NODE_ID]


async def test_a_tombstone_takes_a_node_away(stage: Stage, broker: BrokerAddress) -> None:
    async with stage.connected(broker):
        await send(broker, *introduction(stage.node))
        await stage.until("accepted")
        await send(broker, (topics.announce(NODE_ID), b""), (topics.identity(NODE_ID), b""))
        await stage.until("tombstone")
        assert announced(stage) == []


async def test_heartbeats_are_counted_by_whether_they_fit(stage: Stage, broker: BrokerAddress) -> None:
    topic = topics.heartbeat(NODE_ID)
    bad = [b"", b"{", b"null", beat(stage.node, node_id=OTHER_NODE_ID), beat(stage.node, more=1)]
    async with stage.connected(broker):
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
    async with stage.connected(broker):
        await send(broker, (topic, payload), *introduction(stage.node))
        await stage.until("accepted")
        # nats-server keeps the order within each subscription only.
        await until(lambda: stage.hub.counted("messages_dropped_total", reason=reason) == 1)
        assert announced(stage) == [NODE_ID]


@pytest.mark.parametrize("payload", [b"\x00\xff", b"-----BEGIN CERTIFICATE-----\xff", b"{}"])
async def test_garbage_on_the_topics_of_one_node_costs_the_others_nothing(
    stage: Stage, broker: BrokerAddress, payload: bytes
) -> None:
    async with stage.connected(broker):
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
    async with stage.connected(broker):
        await send(broker, (topics.announce(OTHER_NODE_ID), b""), *introduction(stage.node), retain=False)
        await stage.until("accepted")
        line = await stage.hub.lines.until("message not understood")
    assert line["error"] == r"RuntimeError: \x1b[(left out)"
    assert "in broken" in line["exception"]
    assert "c2VjcmV0" * 8 not in json.dumps(line)
    assert stage.hub.counted("messages_dropped_total", reason="internal") == 1


async def test_a_manifest_on_another_nodes_topic_is_rejected(stage: Stage, broker: BrokerAddress) -> None:
    async with stage.connected(broker):
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
    async with stage.connected(broker, unknown_nodes=allowance, monotonic=seconds, sleep=pauses.sleep):
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
    async with stage.connected(broker, unknown_nodes=allowance, monotonic=Seconds(), sleep=Pauses().sleep):
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
        fleet.connection_changed(NODE_ID, Where.HERE)
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
    async with stage.connected(broker):
        pass
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


async def test_a_broker_that_goes_away_is_noticed_and_found_again(
    stage: Stage, stoppable_broker: Broker
) -> None:
    address = stoppable_broker.address
    async with stage.connected(address) as feed:
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
    async with stage.connected(broker):
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
    try:
        async with subscribed(hub, broker.address, tls=authority.relay_context()) as feed:
            await hub.lines.until("broker connected")
            assert feed.connected
    finally:
        broker.stop()


TOPICS = [("a/+", 1), ("b/+", 1)]
LARGEST = 100


class Relay:
    """A connection, and what comes of it."""

    def __init__(self, address: BrokerAddress, **options: Any) -> None:
        self.states: asyncio.Queue[tuple[bool, str]] = asyncio.Queue()
        self.batches: list[list[MqttMessage]] = []
        self.taken = asyncio.Condition()
        self.faults = 0
        self.go_on = asyncio.Event()
        self.go_on.set()
        self.refusals: list[str] = []
        self.lines = LogLines()
        self.connection = MqttConnection(
            broker=address,
            client_id="edge-relay-test",
            subscriptions=TOPICS,
            largest=LARGEST,
            changed=lambda connected, reason: self.states.put_nowait((connected, reason)),
            refused=self.refusals.append,
            progress=Loop(time.monotonic),
            log=make_logger("relay", self.lines),
            **{"tls": None, "longest_wait_s": 0.01, **options},
        )

    async def take(self, messages: Sequence[MqttMessage]) -> None:
        if self.faults:
            self.faults -= 1
            raise RuntimeError
        async with self.taken:
            self.batches.append(list(messages))
            self.taken.notify_all()
        await self.go_on.wait()

    async def state(self) -> tuple[bool, str]:
        return await asyncio.wait_for(self.states.get(), BOUND_S)

    async def messages(self, count: int) -> list[MqttMessage]:
        """Return the first ``count`` messages, once they were taken."""
        async with asyncio.timeout(BOUND_S), self.taken:
            await self.taken.wait_for(lambda: sum(map(len, self.batches)) >= count)
        return [message for batch in self.batches for message in batch]


@asynccontextmanager
async def connecting(address: BrokerAddress, **options: Any) -> AsyncIterator[Relay]:
    relay = Relay(address, **options)
    running = asyncio.create_task(relay.connection.run(relay.take))
    try:
        yield relay
        assert not running.done()
    finally:
        running.cancel()
        with suppress(asyncio.CancelledError):
            await asyncio.wait_for(running, BOUND_S)


@asynccontextmanager
async def accepted(
    server: ssl.SSLContext | None = None, **options: Any
) -> AsyncIterator[tuple[Relay, BrokerEnd]]:
    """Hold a connection that a broker has accepted, and the broker's end of it."""
    async with PlayedBroker.running(server) as broker, connecting(broker.address, **options) as relay:
        end = await broker.next()
        await end.accept()
        assert await relay.state() == (True, "subscribed")
        yield relay, end


def numbered(count: int, payload: bytes = b"") -> list[MqttMessage]:
    return [(f"a/{number}", payload) for number in range(count)]


async def test_it_subscribes_when_it_connects_and_again_when_asked() -> None:
    async with PlayedBroker.running() as broker, connecting(broker.address) as relay:
        end = await broker.next()
        assert await end.accept() == ["a/+", "b/+"]
        assert await relay.state() == (True, "subscribed")
        relay.connection.subscribe()
        assert (await end.receive())[0] == SUBSCRIBE


async def test_messages_that_arrive_together_are_taken_together_in_order_and_acknowledged() -> None:
    messages = numbered(50, b"x")
    async with accepted() as (relay, end):
        end.writer.write(b"".join(publication(*message, id_ + 1) for id_, message in enumerate(messages)))
        assert await relay.messages(50) == messages
        assert len(relay.batches) < 10
        assert await end.acknowledged(50) == list(range(1, 51))


async def test_a_message_in_pieces_is_whole() -> None:
    async with accepted() as (relay, end):
        for byte in publication("a/1", b"in pieces"):
            end.writer.write(bytes([byte]))
            await end.writer.drain()
        assert await relay.messages(1) == [("a/1", b"in pieces")]


async def test_of_a_payload_that_is_too_large_one_byte_more_is_kept() -> None:
    async with accepted() as (relay, end):
        end.writer.write(publication("a/1", b"x" * 300_000) + publication("a/2", b"y" * LARGEST))
        assert await relay.messages(2) == [("a/1", b"x" * (LARGEST + 1)), ("a/2", b"y" * LARGEST)]


async def test_nothing_is_read_while_a_batch_is_taken() -> None:
    large = publication("a/1", b"x" * 200_000)
    async with accepted() as (relay, end):
        relay.go_on.clear()
        end.writer.write(large)
        await relay.messages(1)
        for _ in range(200):  # 40 MB, more than the sockets buffer
            end.writer.write(large)
        for _ in range(100):
            await asyncio.sleep(0)
        assert end.writer.transport.get_write_buffer_size() > 10_000_000
        assert len(relay.batches) == 1
        relay.go_on.set()
        assert len(await relay.messages(201)) == 201


async def test_after_a_few_messages_there_is_a_pause_and_after_many_none() -> None:
    pauses = Pauses()
    async with accepted(sleep=pauses.sleep) as (relay, end):
        end.writer.write(publication("b/1", b""))
        pause = await pauses.next()
        assert pause.seconds == PAUSE_S
        end.writer.write(b"".join(publication(*message) for message in numbered(100)))
        await end.writer.drain()
        assert relay.batches == [[("b/1", b"")]]
        pause.end()
        assert (await relay.messages(101))[1:] == numbered(100)
        assert (await pauses.next()).seconds == 0


async def test_over_tls_what_is_decrypted_already_does_not_wait_for_more(tmp_path: Path) -> None:
    authority = PlayedAuthority(tmp_path, time.time_ns() // 1_000_000)
    shown = authority.server("edge-broker")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(shown.certificate, shown.key)
    messages = numbered(300, b"x" * 50)
    tls = authority.relay_context()
    async with accepted(server=context, tls=tls) as (relay, end):
        # One record of TLS holds them all, and an answer that is no message among them.
        half = [
            b"".join(publication(*message) for message in part) for part in (messages[:150], messages[150:])
        ]
        end.writer.write(b"\xd0\x00".join(half))
        assert await relay.messages(300) == messages


async def test_a_broker_that_is_not_there_is_tried_again_and_the_wait_doubles_to_the_longest() -> None:
    pauses = Pauses()
    address = BrokerAddress("127.0.0.1", unused_port())
    async with connecting(address, longest_wait_s=3.0, sleep=pauses.sleep) as relay:
        waits: list[float] = []
        while len(waits) < 4:
            pause = await pauses.next()
            waits.append(pause.seconds)
            pause.end()
        assert waits == [1.0, 2.0, 3.0, 3.0]
        assert await relay.state() == (False, "Connection refused")


async def test_without_a_thread_left_it_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_thread_left(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    pauses = Pauses()
    monkeypatch.setattr(threading.Thread, "start", no_thread_left)
    async with PlayedBroker.running() as broker, connecting(broker.address, sleep=pauses.sleep) as relay:
        assert await relay.state() == (False, "Resource temporarily unavailable")
        pause = await pauses.next()
        monkeypatch.undo()
        pause.end()
        assert await (await broker.next()).accept() == [topic for topic, _ in TOPICS]
        assert relay.lines.entries() == []


async def test_a_connection_that_is_lost_is_followed_by_another() -> None:
    async with PlayedBroker.running() as broker, connecting(broker.address) as relay:
        for _ in range(2):
            end = await broker.next()
            await end.accept()
            assert await relay.state() == (True, "subscribed")
            end.writer.write(publication("a/1", b""))
            await relay.messages(1)
            end.writer.transport.abort()
            connected, _ = await relay.state()
            assert not connected


async def test_a_broker_that_refuses_is_tried_again() -> None:
    async with PlayedBroker.running() as broker, connecting(broker.address) as relay:
        await (await broker.next()).refuse()
        connected, reason = await relay.state()
        assert (connected, reason) == (False, "Not authorized")
        await (await broker.next()).accept()
        while not (await relay.state())[0]:
            pass


async def test_a_topic_that_is_not_utf_8_is_taken_as_none() -> None:
    packet = publication("a/1", b"x").replace(b"a/1", b"a/\xff")
    async with accepted() as (relay, end):
        end.writer.write(packet + publication("a/2", b"y"))
        assert await relay.messages(2) == [("", b"x"), ("a/2", b"y")]


async def test_a_fault_in_reading_is_logged_and_followed_by_another_connection() -> None:
    async with PlayedBroker.running() as broker, connecting(broker.address) as relay:
        end = await broker.next()
        await end.accept()
        assert await relay.state() == (True, "subscribed")
        relay.faults = 1
        end.writer.write(publication("a/1", b""))
        line = await relay.lines.until("broker not understood")
        assert "RuntimeError" in line["error"]
        await end.until_ended()
        connected, _ = await relay.state()
        assert not connected
        await (await broker.next()).accept()
        assert await relay.state() == (True, "subscribed")


async def test_a_broker_that_falls_silent_is_pinged_and_left() -> None:
    async with accepted(keepalive_s=1) as (relay, end):
        assert (await end.receive())[0] == PINGREQ
        end.pong()
        assert (await end.receive())[0] == PINGREQ
        await end.until_ended()
        connected, _ = await relay.state()
        assert not connected


async def test_acknowledgements_that_the_broker_does_not_read_are_sent_later() -> None:
    count = 30_000
    async with accepted() as (relay, end):
        ours = relay.connection._client.socket()  # noqa: SLF001 - else megabytes fit into its buffer
        assert isinstance(ours, socket.socket)
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2048)
        end.writer.write(b"".join(publication("a/1", b"", id_ % 60_000 + 1) for id_ in range(count)))
        await relay.messages(count)
        assert len(await end.acknowledged(count)) == count


async def test_at_the_end_it_says_goodbye() -> None:
    async with PlayedBroker.running() as broker:
        async with connecting(broker.address) as relay:
            end = await broker.next()
            await end.accept()
            await relay.state()
        assert (await end.receive())[0] == DISCONNECT
        await end.until_ended()
