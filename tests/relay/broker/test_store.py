"""The store of a real nats-server, which clients try to fill for all others."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from queue import Queue

import paho.mqtt.client as paho
import pytest
from nacl.signing import SigningKey
from paho.mqtt.enums import CallbackAPIVersion

from relay.broker import nats_server
from relay.broker.nats_server import STORE_BYTES, find_nats_server
from relay.broker.store import LIMITS, RETAINED, BrokerStore
from relay.broker.supervisor import BrokerSupervisor
from schemas import topics
from schemas.addresses import BrokerAddress
from schemas.manifest import MAX_MANIFEST_BYTES
from schemas.process.logs import make_logger
from tests.fakes.background import in_background
from tests.fakes.broker import BOUND_S, publish
from tests.fakes.lines import LogLines
from tests.fakes.polling import until
from tests.fakes.ports import unused_port
from tests.fakes.signer import NODE_ID, OTHER_NODE_ID

pytestmark = pytest.mark.integration

KIB = 1024
SMALL_STORE = 2048 * KIB
SMALL = {RETAINED: 1024 * KIB, "$MQTT_msgs": 512 * KIB, "$MQTT_sess": 256 * KIB}
LIMITED = ["$MQTT_rmsgs", "$MQTT_msgs", "$MQTT_sess"]
FULL = "the broker's store is full"


@dataclass
class Stage:
    """The relay's own broker with a small store, and what was said of it."""

    directory: Path
    address: BrokerAddress = field(default_factory=lambda: BrokerAddress("127.0.0.1", unused_port()))
    log: LogLines = field(default_factory=LogLines)
    filled: list[float] = field(default_factory=list)
    looks: list[float] = field(default_factory=list)

    async def pause(self, seconds: float) -> None:
        self.looks.append(seconds)
        await asyncio.sleep(0.05)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        log = make_logger("relay", self.log)
        supervisor = BrokerSupervisor(
            self.address,
            self.directory / "broker",
            None,
            find_program=find_nats_server,
            on_end=lambda: None,
            probe_node=NODE_ID,
            log=log,
        )
        key = SigningKey(bytes(32))
        store = BrokerStore(
            lambda: supervisor.own_port, key, self.filled.append, log, limits=SMALL, sleep=self.pause
        )
        await supervisor.start()
        try:
            async with in_background(store.run()):
                yield
        finally:
            await supervisor.close()

    async def until_limited(self) -> None:
        """Have the streams made by a first client, and wait until they have limits."""
        await asyncio.to_thread(publish, self.address, (topics.heartbeat(NODE_ID), b""))
        await until(lambda: self.looks and self.looks[-1] > 1)

    def client(self, name: str, *, clean: bool = True) -> paho.Client:
        client = paho.Client(CallbackAPIVersion.VERSION2, client_id=name, clean_session=clean)
        client.connect(self.address.host, self.address.port)
        client.loop_start()
        return client


@pytest.fixture(autouse=True)
def small_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give the broker so little room that each of the attacks would fill it."""
    monkeypatch.setattr(nats_server, "STORE_BYTES", SMALL_STORE)


@pytest.fixture
async def stage(tmp_path: Path) -> AsyncIterator[Stage]:
    stage = Stage(tmp_path)
    async with stage.running():
        await stage.until_limited()
        yield stage


def leave(client: paho.Client) -> None:
    client.disconnect()
    client.loop_stop()


def retain(stage: Stage, count: int) -> None:
    """Retain ``count`` of the largest manifests, each below a topic of its own."""
    messages = ((f"$devices/{number}/announce", bytes(MAX_MANIFEST_BYTES)) for number in range(count))
    publish(stage.address, *messages)


def test_what_is_granted_to_the_streams_is_less_than_the_whole_store() -> None:
    assert list(LIMITS) == list(SMALL) == LIMITED
    assert sum(LIMITS.values()) < STORE_BYTES
    assert sum(SMALL.values()) < SMALL_STORE


async def test_a_full_store_keeps_what_it_has_and_serves_and_says_so(stage: Stage) -> None:
    mine = (topics.announce(OTHER_NODE_ID), b"was there before")
    await asyncio.to_thread(publish, stage.address, mine)
    await asyncio.to_thread(retain, stage, 12)
    await until(lambda: stage.log.entries(FULL))
    await until(lambda: stage.filled[-1] > 0.8)
    assert max(stage.filled) <= 1
    received: list[tuple[str, bytes]] = []
    reader = await asyncio.to_thread(stage.client, "relay")
    reader.on_message = lambda _c, _d, message: received.append((message.topic, bytes(message.payload)))
    reader.subscribe([("$devices/+/announce", 1)])
    await until(lambda: mine in received)
    new = (topics.announce(NODE_ID), bytes(MAX_MANIFEST_BYTES))
    await asyncio.to_thread(publish, stage.address, new)  # not kept, but delivered
    await until(lambda: new in received)
    leave(reader)


async def test_clients_that_ask_to_be_remembered_do_not_keep_others_out(stage: Stage) -> None:
    def come_and_go(number: int) -> None:
        client = stage.client(f"{number:03}".ljust(60_000, "x"), clean=False)
        client.subscribe("nothing")
        leave(client)

    for number in range(40):
        await asyncio.to_thread(come_and_go, number)
    await asyncio.to_thread(publish, stage.address, (topics.announce(NODE_ID), b"{}"))
    assert not stage.log.entries(FULL)


async def test_what_a_slow_subscriber_does_not_read_does_not_keep_others_out(stage: Stage) -> None:
    """It does not confirm what it is sent, so the broker keeps that, up to its limit."""
    slow = paho.Client(CallbackAPIVersion.VERSION2, client_id="slow", manual_ack=True)
    granted: Queue[object] = Queue()
    slow.on_subscribe = lambda *arguments: granted.put(arguments)
    slow.connect(stage.address.host, stage.address.port)
    slow.loop_start()
    slow.subscribe("$devices/+/telemetry", 1)
    await asyncio.to_thread(granted.get, timeout=BOUND_S)
    sample = (topics.telemetry(NODE_ID), bytes(MAX_MANIFEST_BYTES))
    await asyncio.to_thread(publish, stage.address, *[sample] * 20, retain=False)
    await asyncio.to_thread(publish, stage.address, (topics.announce(NODE_ID), b"{}"))
    assert not stage.log.entries(FULL)
    leave(slow)


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ([b"HTTP/1.1 400 Bad Request\r\n"], "_StoreError: it does not speak NATS"),
        ([b"INFO {}\r\n", b'MSG _INBOX.edge-store 1 400\r\n{"type'], "IncompleteReadError: "),
        ([b"INFO []\r\n"], "AttributeError: "),
    ],
    ids=["stranger", "cut short", "no object"],
)
async def test_limits_are_set_again_after_a_restart_and_what_does_not_answer_is_reported(
    tmp_path: Path, said: list[bytes], reason: str
) -> None:
    stage = Stage(tmp_path)
    async with stage.running():
        await stage.until_limited()
        await asyncio.to_thread(retain, stage, 12)
    stage.looks.clear()
    async with stage.running():
        await stage.until_limited()
        await until(lambda: stage.filled[-1] > 0.8)

    async def stranger(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(said[0])
        for answer in said[1:]:
            while (await reader.readline()).strip():
                pass  # up to the empty body of the first question
            writer.write(answer)
        writer.close()

    server = await asyncio.start_server(stranger, "127.0.0.1", 0)
    log = LogLines()
    store = BrokerStore(
        lambda: server.sockets[0].getsockname()[1],
        SigningKey(bytes(32)),
        stage.filled.append,
        make_logger("relay", log),
        sleep=stage.pause,
    )
    stage.looks.clear()
    async with in_background(store.run()):
        await until(lambda: len(stage.looks) > 1)
    server.close()
    (line,) = log.entries("the broker's store has no limits")
    assert line["reason"].startswith(reason)
