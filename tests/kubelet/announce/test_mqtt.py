import asyncio
import json
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

import pytest

from kubelet.announce.mqtt import FIRST_WAIT_S, LONGEST_WAIT_S, MAX_UNCONFIRMED, MqttPublisher, publish_all
from schemas.addresses import BrokerAddress
from schemas.pacing import Backoff
from schemas.process.logs import make_logger
from tests.fakes.chance import short_waits
from tests.fakes.fault_proxy import FaultProxy
from tests.fakes.lines import LogLines
from tests.fakes.mqtt_listener import MqttListener
from tests.fakes.played_broker import PlayedBroker
from tests.fakes.seconds import Seconds

BOUND_S = 30
TOPIC = "$devices/01hzx9k3m4p7q8r9s0t1v2w3xy/announce"
CLOSED_PORT = BrokerAddress("127.0.0.1", 9)  # the discard port, which no CI machine serves
CONNECT, DISCONNECT = 0x10, 0xE0
NOT_AUTHORISED = b"\x20\x02\x00\x05"


class Connections:
    """Counts connects, each announced by the publisher's callback."""

    def __init__(self, publisher: MqttPublisher) -> None:
        self._queue: asyncio.Queue[str] = asyncio.Queue()
        publisher.when_connected(self._greet)

    def _greet(self) -> None:
        # On the event loop, or this would raise.
        asyncio.get_running_loop()
        self._queue.put_nowait("connected")

    async def next(self) -> None:
        await asyncio.wait_for(self._queue.get(), BOUND_S)


@asynccontextmanager
async def started(publisher: MqttPublisher) -> AsyncIterator[Connections]:
    connections = Connections(publisher)
    publisher.start()
    try:
        yield connections
    finally:
        await publisher.stop()


def publisher_to(broker: BrokerAddress, log: LogLines, nodes: int = 1) -> MqttPublisher:
    return MqttPublisher(broker, "edge-kubelet-test", make_logger("kubelet", log), short_waits(), nodes=nodes)


async def test_a_retained_message_waits_at_the_broker_for_those_who_come_later(
    broker: BrokerAddress, log: LogLines
) -> None:
    publisher = publisher_to(broker, log)
    async with started(publisher) as connections:
        await connections.next()
        assert publisher.connected
        assert await publisher.publish_confirmed(TOPIC, b"\x00manifest\xff") is True
        async with MqttListener(broker, TOPIC).listening() as listener:
            message = await listener.next()
    assert (message.payload, message.retained, message.qos) == (b"\x00manifest\xff", True, 1)
    assert log.entries("broker connected")[0]["broker"] == str(broker)


async def test_no_task_finds_a_new_connection_before_the_callback_has_used_it(
    broker: BrokerAddress, log: LogLines
) -> None:
    publisher = publisher_to(broker, log)
    called: list[bool] = []
    publisher.when_connected(lambda: called.append(publisher.connected))
    publisher.start()
    try:
        async with asyncio.timeout(BOUND_S):
            while not publisher.connected:  # noqa: ASYNC110 - a task that runs in every turn of the loop
                await asyncio.sleep(0)
        assert called == [True]
    finally:
        await publisher.stop()


@pytest.mark.parametrize(("retain", "qos"), [(True, 1), (False, 0)])
async def test_what_is_kept_is_confirmed_and_what_passes_is_not(
    broker: BrokerAddress, log: LogLines, *, retain: bool, qos: int
) -> None:
    publisher = publisher_to(broker, log)
    async with MqttListener(broker, TOPIC).listening() as listener, started(publisher) as connections:
        await connections.next()
        assert publisher.publish(TOPIC, b"one", retain=retain) is True
        message = await listener.next()
        assert (message.payload, message.qos) == (b"one", qos)
        assert publisher.publish(TOPIC, b"two", retain=retain) is True
        assert (await listener.next()).payload == b"two"


async def test_a_message_that_passes_is_not_kept(broker: BrokerAddress, log: LogLines) -> None:
    publisher = publisher_to(broker, log)
    async with started(publisher) as connections:
        await connections.next()
        publisher.publish(TOPIC, b"passing", retain=False)
        assert await publisher.publish_confirmed(TOPIC + "/end", b"kept") is True
        async with MqttListener(broker, TOPIC + "/#").listening() as listener:
            assert (await listener.next()).payload == b"kept"


async def test_what_is_published_without_a_connection_is_told_and_not_queued(
    broker: BrokerAddress, log: LogLines
) -> None:
    publisher = publisher_to(broker, log)
    assert publisher.publish(TOPIC, b"too early", retain=True) is False
    async with MqttListener(broker, TOPIC).listening() as listener, started(publisher) as connections:
        assert publisher.publish(TOPIC, b"too early", retain=True) is False
        await connections.next()
        assert publisher.publish(TOPIC, b"in time", retain=True) is True
        assert (await listener.next()).payload == b"in time"
        assert await publisher.publish_confirmed(TOPIC, b"the last") is True
        assert (await listener.next()).payload == b"the last"


async def test_a_confirmation_that_cannot_come_is_no_confirmation(log: LogLines) -> None:
    assert await publisher_to(CLOSED_PORT, log).publish_confirmed(TOPIC, b"manifest") is False


async def test_a_lost_broker_is_found_again_and_everybody_is_told(
    broker: BrokerAddress, log: LogLines
) -> None:
    async with FaultProxy(broker).running() as proxy:
        publisher = publisher_to(proxy.address, log)
        async with started(publisher) as connections:
            other = Connections(publisher)
            await connections.next()
            await other.next()
            proxy.cut()
            await log.until("broker lost")
            states = [publisher.connected]
            assert publisher.publish(TOPIC, b"lost", retain=True) is False
            await connections.next()
            await other.next()
            assert [*states, publisher.connected] == [False, True]
            assert await publisher.publish_confirmed(TOPIC, b"found") is True


class Ceilings(random.Random):
    """Draws the shortest wait each time, and keeps what the longest would have been."""

    def __init__(self) -> None:
        super().__init__()
        self.drawn: list[float] = []

    def uniform(self, a: float, b: float) -> float:
        self.drawn.append(b)
        return a


@pytest.mark.parametrize(
    ("held_s", "ceilings"),
    [
        pytest.param(LONGEST_WAIT_S, [5, 10, 20], id="another machine has this identity"),
        pytest.param(LONGEST_WAIT_S + 1, [5, 5, 5], id="the broker was restarted now and then"),
    ],
)
async def test_waits_grow_although_every_connect_succeeds_until_one_holds(
    broker: BrokerAddress, log: LogLines, held_s: float, ceilings: list[float]
) -> None:
    chance, clock = Ceilings(), Seconds()
    async with FaultProxy(broker).running() as proxy:
        backoff = Backoff(FIRST_WAIT_S, LONGEST_WAIT_S, partial(chance.uniform, 0.0))
        publisher = MqttPublisher(
            proxy.address, "a-clone", make_logger("kubelet", log), backoff, monotonic=clock
        )
        async with started(publisher) as connections:
            for _ in range(2):
                await connections.next()
                clock.now += held_s
                proxy.cut()
            await connections.next()
            assert chance.drawn == ceilings


@pytest.mark.integration
async def test_a_broker_that_is_away_is_logged_and_the_publisher_goes_on(log: LogLines) -> None:
    publisher = publisher_to(CLOSED_PORT, log)
    async with started(publisher):
        line = await log.until("broker not reached")
        assert not publisher.connected
    assert (line["level"], line["broker"]) == ("info", str(CLOSED_PORT))
    assert line["reason"] == "Connection refused"


async def test_a_clean_stop_is_no_loss(broker: BrokerAddress, log: LogLines) -> None:
    publisher = publisher_to(broker, log)
    async with started(publisher) as connections:
        await connections.next()
    assert not publisher.connected
    assert [line["event"] for line in log.entries()] == ["broker connected"]


@asynccontextmanager
async def raw_broker(answer: bytes) -> AsyncIterator[tuple[BrokerAddress, asyncio.Queue[bytes]]]:
    """Serve whatever ``answer`` is to a CONNECT, and hand over the first byte of each packet that comes."""
    packets: asyncio.Queue[bytes] = asyncio.Queue()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while head := await reader.read(2):
            await reader.readexactly(head[1])
            await packets.put(head)
            if head[0] == CONNECT:
                writer.write(answer)
        writer.close()

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    async with server:
        yield BrokerAddress("127.0.0.1", server.sockets[0].getsockname()[1]), packets


@pytest.mark.integration
async def test_a_broker_that_refuses_is_not_taken_for_one_that_accepts(log: LogLines) -> None:
    async with raw_broker(NOT_AUTHORISED) as (address, _):
        publisher = publisher_to(address, log)
        async with started(publisher):
            line = await log.until("broker refused the connection")
            assert not publisher.connected
            assert publisher.publish(TOPIC, b"manifest", retain=True) is False
    assert line["reason"] == "Not authorized"
    assert log.entries("broker connected") == []


@pytest.mark.integration
@pytest.mark.parametrize("nodes", [1, 3])
async def test_what_a_broker_does_not_confirm_is_bounded_and_counted(log: LogLines, nodes: int) -> None:
    async with raw_broker(b"\x20\x02\x00\x00") as (address, _):
        publisher = publisher_to(address, log, nodes)
        async with started(publisher) as connections:
            await connections.next()
            taken = [publisher.publish(TOPIC, b"", retain=True) for _ in range(MAX_UNCONFIRMED * nodes + 3)]
    assert taken == [True] * MAX_UNCONFIRMED * nodes + [False] * 3
    assert publisher.refused == 3


@pytest.mark.integration
async def test_what_was_refused_is_published_once_what_fills_the_queue_is_confirmed(log: LogLines) -> None:
    taken: list[bool] = []

    def publish() -> None:
        taken.append(publisher.publish(TOPIC, b"%d" % len(taken), retain=True))

    async with PlayedBroker.running() as broker:
        publisher = publisher_to(broker.address, log)
        publisher.when_connected(publish)
        async with started(publisher) as connections:
            end = await broker.next()
            await end.receive()
            end.writer.write(b"\x20\x02\x00\x00")
            await connections.next()
            for _ in range(MAX_UNCONFIRMED):
                publish()
            assert taken == [True] * MAX_UNCONFIRMED + [False]
            for number in (*range(MAX_UNCONFIRMED), MAX_UNCONFIRMED + 1):
                _, body = await end.receive()
                packet_id, payload = body[len(TOPIC) + 2 : len(TOPIC) + 4], body[len(TOPIC) + 4 :]
                assert payload == b"%d" % number
                end.writer.write(b"\x40\x02" + packet_id)


@pytest.mark.integration
async def test_stopping_takes_leave_of_the_broker(log: LogLines) -> None:
    async with raw_broker(b"\x20\x02\x00\x00") as (address, packets):
        async with started(publisher_to(address, log)) as connections:
            await connections.next()
        heads = [(await asyncio.wait_for(packets.get(), BOUND_S))[0] for _ in range(2)]
    assert heads == [CONNECT, DISCONNECT]


async def test_stopping_what_never_started_is_harmless(log: LogLines) -> None:
    await publisher_to(CLOSED_PORT, log).stop()


MESSAGES = [("a-node/identity", b"leaf"), ("a-node/announce", b"manifest")]


@pytest.mark.integration
async def test_all_messages_are_confirmed_retained_and_in_order(broker: BrokerAddress, log: LogLines) -> None:
    publisher = publisher_to(broker, log)
    async with MqttListener(broker, "a-node/+").listening() as listener:
        assert await publish_all(publisher, MESSAGES, BOUND_S) is True
        came = [await listener.next() for _ in MESSAGES]
    assert [(message.topic, message.payload) for message in came] == MESSAGES
    async with MqttListener(broker, "a-node/+").listening() as late:
        assert all([(await late.next()).retained for _ in MESSAGES])


@pytest.mark.integration
async def test_a_broker_that_is_not_there_has_confirmed_nothing(log: LogLines) -> None:
    assert await publish_all(publisher_to(CLOSED_PORT, log), MESSAGES, timeout_s=0.05) is False
    assert json.loads(log.getvalue().splitlines()[0])["event"] == "broker not reached"
