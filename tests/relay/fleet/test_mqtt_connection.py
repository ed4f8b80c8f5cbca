import asyncio
import socket
import ssl
import threading
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from relay.fleet.mqtt_feed import PAUSE_S, MqttConnection, MqttMessage
from schemas.addresses import BrokerAddress
from schemas.health import Loop
from schemas.process.logs import make_logger
from tests.fakes.lines import LogLines
from tests.fakes.pauses import Pauses
from tests.fakes.played_broker import DISCONNECT, PINGREQ, SUBSCRIBE, PlayedBroker, publication
from tests.fakes.ports import unused_port
from tests.fakes.tls_broker import PlayedAuthority

pytestmark = pytest.mark.integration

BOUND_S = 10
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
    async with PlayedBroker.running() as broker, connecting(broker.address) as relay:
        end = await broker.next()
        await end.accept()
        end.writer.write(b"".join(publication(*message, id_ + 1) for id_, message in enumerate(messages)))
        assert await relay.messages(50) == messages
        assert len(relay.batches) < 10
        assert await end.acknowledged(50) == list(range(1, 51))


async def test_a_message_in_pieces_is_whole() -> None:
    async with PlayedBroker.running() as broker, connecting(broker.address) as relay:
        end = await broker.next()
        await end.accept()
        for byte in publication("a/1", b"in pieces"):
            end.writer.write(bytes([byte]))
            await end.writer.drain()
        assert await relay.messages(1) == [("a/1", b"in pieces")]


async def test_of_a_payload_that_is_too_large_one_byte_more_is_kept() -> None:
    async with PlayedBroker.running() as broker, connecting(broker.address) as relay:
        end = await broker.next()
        await end.accept()
        end.writer.write(publication("a/1", b"x" * 300_000) + publication("a/2", b"y" * LARGEST))
        assert await relay.messages(2) == [("a/1", b"x" * (LARGEST + 1)), ("a/2", b"y" * LARGEST)]


async def test_nothing_is_read_while_a_batch_is_taken() -> None:
    large = publication("a/1", b"x" * 200_000)
    async with PlayedBroker.running() as broker, connecting(broker.address) as relay:
        end = await broker.next()
        await end.accept()
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
    async with PlayedBroker.running() as broker, connecting(broker.address, sleep=pauses.sleep) as relay:
        end = await broker.next()
        await end.accept()
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
    async with PlayedBroker.running(context) as broker, connecting(broker.address, tls=tls) as relay:
        end = await broker.next()
        await end.accept()
        assert await relay.state() == (True, "subscribed")
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
    async with PlayedBroker.running() as broker, connecting(broker.address) as relay:
        end = await broker.next()
        await end.accept()
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
    async with PlayedBroker.running() as broker, connecting(broker.address, keepalive_s=1) as relay:
        end = await broker.next()
        await end.accept()
        assert await relay.state() == (True, "subscribed")
        assert (await end.receive())[0] == PINGREQ
        end.pong()
        assert (await end.receive())[0] == PINGREQ
        await end.until_ended()
        connected, _ = await relay.state()
        assert not connected


async def test_acknowledgements_that_the_broker_does_not_read_are_sent_later() -> None:
    count = 30_000
    async with PlayedBroker.running() as broker, connecting(broker.address) as relay:
        end = await broker.next()
        await end.accept()
        await relay.state()
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
