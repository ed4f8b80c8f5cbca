import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from kubelet.announce.mqtt import MqttPublisher
from kubelet.config import NodeConfig
from kubelet.daemon.node import Node, NodeEnvironment
from kubelet.handlers.base import Handler
from kubelet.handlers.system_echo import EchoHandler
from relay.settings.environment import now_ms
from schemas.addresses import BrokerAddress
from schemas.canonical import jcs
from schemas.certificates import make_csr
from schemas.frames import FrameReader
from schemas.identity_files import IdentityFiles
from schemas.kinds import KindRegistry
from schemas.process.logs import make_logger
from schemas.registry import SchemaRegistry
from tests.fakes.background import in_background
from tests.fakes.chance import FixedChance, short_waits
from tests.fakes.clock import FakeClock
from tests.fakes.fault_proxy import FaultProxy
from tests.fakes.lines import LogLines
from tests.fakes.mqtt_listener import Message, MqttListener
from tests.fakes.node import HARDWARE, announce_again, identity_of, write_identity
from tests.fakes.played_relay import PlayedRelay
from tests.fakes.shipped_kinds import echo_handler
from tests.fakes.signer import DAY_MS, ECHO, METRICS, NODE_ID, NOW_MS, TTL_MS, SimulatedCa, SimulatedNode

pytestmark = pytest.mark.integration

BOUND_S = 30
CLOSED_PORT_URL = "http://127.0.0.1:9"
NO_BROKER = BrokerAddress("127.0.0.1", 9)
TOPICS = [f"$devices/{NODE_ID}/{channel}" for channel in ("identity", "announce", "heartbeat")]


class World:
    """Makes nodes that differ in where they connect."""

    def __init__(
        self,
        node: SimulatedNode,
        registry: SchemaRegistry,
        clock: FakeClock,
        log: LogLines,
        files: IdentityFiles | None = None,
    ) -> None:
        self.simulated = node
        self._registry = registry
        self._clock = clock
        self._log = log
        self.last_issued: Path | None = None
        self.files = files

    @asynccontextmanager
    async def running(
        self,
        broker: BrokerAddress = NO_BROKER,
        relay_url: str = CLOSED_PORT_URL,
        handler: Handler | None = None,
    ) -> AsyncIterator[Node]:
        logger = make_logger("kubelet", self._log)
        environment = NodeEnvironment(
            config=NodeConfig(broker, relay_url),
            publisher=MqttPublisher(broker, f"edge-kubelet-{NODE_ID}", logger, short_waits()),
            registry=self._registry,
            reader=FrameReader(self._registry),
            kinds=KindRegistry(),
            now_ms=self._clock,
            random_bytes=os.urandom,
            rng=FixedChance(0.5),
            log=logger,
        )
        handlers = [handler or echo_handler(NODE_ID, self._clock)]
        identity = identity_of(self.simulated)
        node = Node(identity, handlers, HARDWARE, environment, self.last_issued, self.files)
        environment.publisher.start()
        try:
            async with in_background(node.run()):
                yield node
        finally:
            await environment.publisher.stop()


class Sampled(EchoHandler):
    """Metrics of which the test knows the one sample."""

    @property
    def capability(self) -> Mapping[str, Any]:
        return {**METRICS, "verbs": ["snapshot", "subscribe"]}

    async def invoke(self, verb: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        return {"node_id": NODE_ID, "verb": verb, **arguments}


@pytest.mark.holds("RFC-0001/5.3/subscribe")
async def test_a_lease_of_the_relay_sends_samples_to_it_and_to_the_broker(
    world: World, broker: BrokerAddress, relay: PlayedRelay
) -> None:
    sample = {"node_id": NODE_ID, "verb": "subscribe", "interval_ms": 60_000, "include": ["cpu"]}
    listener = MqttListener(broker, f"$devices/{NODE_ID}/telemetry")
    heartbeats = MqttListener(broker, TOPICS[2])
    handler = echo_handler(NODE_ID, now_ms, Sampled)
    async with listener.listening(), heartbeats.listening(), world.running(broker, relay.url, handler):
        # A sample that comes before the connection to the broker goes to the relay alone.
        await heartbeats.next()
        end = await relay.next()
        await end.admit()
        await end.accept()
        await end.send("telemetry_lease", interval_ms=60_000)
        assert (await end.receive("telemetry")).payload == {"cap_id": "sysmetrics", "sample": sample}
        message = await listener.next()
        assert (json.loads(message.payload), message.retained, message.qos) == (sample, False, 0)
        await end.send("telemetry_lease", ttl_ms=0)
        # At once: of a lease that had not ended, this would only be the next sample, in a minute.
        await end.send("telemetry_lease", interval_ms=60_000)
        assert (await end.receive("telemetry")).payload == {"cap_id": "sysmetrics", "sample": sample}


@pytest.fixture
def world(node: SimulatedNode, registry: SchemaRegistry, clock: FakeClock, log: LogLines) -> World:
    return World(node, registry, clock, log)


async def three(listener: MqttListener) -> list[Message]:
    """Return what one announcement puts on the broker, the heartbeat last.

    Brokers may let a message of QoS 0 overtake those of QoS 1, which stay in order.
    """
    messages = [await listener.next() for _ in range(3)]
    return sorted(messages, key=lambda message: message.topic == TOPICS[2])


async def three_after_reconnect(listener: MqttListener) -> list[Message]:
    """Return the same of a new connection, which first repeats what the broker had not yet confirmed."""
    beats: list[Message] = []
    others: list[Message] = []
    while not beats or [message.topic for message in others[-2:]] != TOPICS[:2]:
        message = await listener.next()
        (beats if message.topic == TOPICS[2] else others).append(message)
    return [*others[-2:], *beats]


async def test_the_identity_comes_before_the_manifest_and_a_heartbeat_says_so(
    world: World, broker: BrokerAddress, registry: SchemaRegistry
) -> None:
    listener = MqttListener(broker, f"$devices/{NODE_ID}/#")
    async with listener.listening(), world.running(broker) as node:
        identity, announce, heartbeat = await three(listener)
        manifest = node.announcer.current
    assert [identity.topic, announce.topic, heartbeat.topic] == TOPICS
    assert manifest is not None
    assert identity.payload.decode() == world.simulated.leaf_pem + world.simulated.root_pem
    assert announce.payload == manifest.wire
    beat = json.loads(heartbeat.payload)
    assert registry.load("heartbeat@1.0.0").is_valid(beat)
    assert beat == {
        "node_id": NODE_ID,
        "ts_ms": NOW_MS,
        "seq": beat["seq"],
        "manifest_etag": manifest.etag,
        "expires_at_ms": NOW_MS + TTL_MS,
    }


async def test_identity_and_manifest_are_kept_by_the_broker_byte_for_byte_and_heartbeats_are_not(
    world: World, broker: BrokerAddress
) -> None:
    listener = MqttListener(broker, f"$devices/{NODE_ID}/#")
    async with listener.listening(), world.running(broker) as node:
        await three(listener)
        manifest = node.announcer.published
        assert manifest is not None
        async with MqttListener(broker, f"$devices/{NODE_ID}/#").listening() as late:
            kept = {message.topic: message for message in [await late.next(), await late.next()]}
            announce_again(node.announcer)
            fresh = [await late.next(), await late.next()]
    assert set(kept) == set(TOPICS[:2])
    assert all(message.retained for message in kept.values())
    assert kept[TOPICS[0]].payload.decode() == world.simulated.leaf_pem + world.simulated.root_pem
    assert kept[TOPICS[1]].payload == manifest.wire
    # The broker kept no heartbeat: what follows is a new announcement, without the identity that it has.
    assert {(message.topic, message.retained) for message in fresh} == {
        (topic, False) for topic in TOPICS[1:]
    }


async def test_heartbeats_are_counted(world: World, broker: BrokerAddress) -> None:
    listener = MqttListener(broker, f"$devices/{NODE_ID}/heartbeat")
    async with listener.listening(), world.running(broker) as node:
        beats = [json.loads((await listener.next()).payload)]
        for _ in range(2):
            announce_again(node.announcer)
            beats.append(json.loads((await listener.next()).payload))
    first = beats[0]["seq"]
    assert [beat["seq"] for beat in beats] == [first, first + 1, first + 2]
    # A manifest that is signed while the broker connects is published once, and not for both reasons.
    assert len({beat["manifest_etag"] for beat in beats}) == len(beats)


async def test_everything_is_published_again_after_a_reconnect(world: World, broker: BrokerAddress) -> None:
    listener = MqttListener(broker, f"$devices/{NODE_ID}/#")
    async with (
        FaultProxy(broker).running() as proxy,
        listener.listening(),
        world.running(proxy.address) as node,
    ):
        before = await three(listener)
        proxy.cut()
        after = await three_after_reconnect(listener)
        manifest = node.announcer.current
    assert manifest is not None
    assert [message.topic for message in after] == TOPICS
    # The same manifest again: a new connection is no reason to sign.
    assert after[1].payload == before[1].payload == manifest.wire


async def test_the_broker_and_the_relay_get_the_same_manifest(
    world: World, broker: BrokerAddress, relay: PlayedRelay
) -> None:
    listener = MqttListener(broker, TOPICS[1])
    async with listener.listening(), world.running(broker, relay.url):
        end = await relay.next()
        await end.admit()
        assert jcs((await end.accept()).payload) == (await listener.next()).payload


async def test_a_node_without_a_broker_serves_its_relay_whatever_its_clock(
    world: World, relay: PlayedRelay, clock: FakeClock
) -> None:
    async with world.running(relay_url=relay.url) as node:
        end = await relay.next()
        await end.admit()
        await end.accept()
        answer = await end.command()
        assert answer.payload["result"] == {
            "message": "ping",
            "received_at_ms": NOW_MS,
            "node_id": NODE_ID,
        }
        assert node.announcer.published == node.announcer.current
        # Its clock is set: no command is late.
        clock.advance(365 * 86_400_000)
        assert (await end.command()).payload["ok"] is True


class Failing(EchoHandler):
    """Answers, but cannot work between calls."""

    async def run(self) -> None:
        raise RuntimeError("a driver that this board has in another version")


async def test_a_handler_that_fails_between_calls_ends_nothing_else(
    world: World, relay: PlayedRelay, log: LogLines
) -> None:
    async with world.running(relay_url=relay.url, handler=echo_handler(NODE_ID, now_ms, Failing)):
        await log.until("background work failed")
        end = await relay.next()
        await end.admit()
        await end.accept()
        assert (await end.command()).payload["ok"] is True


async def test_a_node_remembers_its_newest_manifest(
    world: World, broker: BrokerAddress, relay: PlayedRelay, tmp_path: Path
) -> None:
    world.last_issued = tmp_path / "last_issued_ms"
    issued = []
    for _ in range(2):
        async with world.running(broker, relay.url):
            end = await relay.next()
            await end.admit()
            issued.append((await end.accept()).payload["issued_at_ms"])
    assert issued[1] > issued[0]


async def test_a_renewed_leaf_is_published_with_the_one_before_and_then_what_it_signed(
    broker: BrokerAddress, registry: SchemaRegistry, relay: PlayedRelay, log: LogLines, tmp_path: Path
) -> None:
    # Today's: the leaf is verified by a process of its own, which goes by the system's clock.
    today = now_ms()
    ca = SimulatedCa("root of today", today)
    node = ca.issue(now_ms=today - 70 * DAY_MS)
    files = write_identity(tmp_path / "state", node)
    files.csr.write_text(make_csr(node.key, NODE_ID))
    world = World(node, registry, FakeClock(today), log, files)
    fresh = ca.issue(key=node.key, now_ms=today)
    listener = MqttListener(broker, f"$devices/{NODE_ID}/#")
    async with listener.listening(), world.running(broker, relay.url):
        end = await relay.next()
        await end.admit()
        await end.accept()
        before = await three(listener)
        asked = await end.receive("renew")
        await end.send("renew_ack", answers=asked.msg_id, certificate=fresh.leaf_pem, roots=ca.root_pem)
        announced = await end.accept()
        after = await three(listener)
    assert announced.payload["node_attestation"]["kid"] == fresh.kid != node.kid
    assert json.loads(before[1].payload)["node_attestation"]["kid"] == node.kid
    assert [message.topic for message in after] == TOPICS
    assert after[0].payload.decode() == fresh.leaf_pem + node.leaf_pem + ca.root_pem
    assert after[1].payload == jcs(announced.payload)
    assert files.read().kid == fresh.kid


class Hanging(Handler):
    """Never ends, in the background and in a call, until it is stopped."""

    def __init__(self) -> None:
        self.calls: asyncio.Queue[str] = asyncio.Queue()
        self.stopped: set[str] = set()

    @property
    def capability(self) -> Mapping[str, Any]:
        return ECHO

    async def invoke(self, verb: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        await self._hang(f"{verb} {arguments['message']}")
        return {}

    async def run(self) -> None:
        await self._hang("background")

    async def _hang(self, what: str) -> None:
        await self.calls.put(what)
        try:
            await asyncio.Event().wait()
        finally:
            self.stopped.add(what)


async def test_when_a_node_ends_everything_in_it_ends(
    world: World, broker: BrokerAddress, relay: PlayedRelay
) -> None:
    handler = Hanging()
    async with world.running(broker, relay.url, handler) as node:
        end = await relay.next()
        await end.admit()
        await end.accept()
        await end.send("cmd")
        begun = {await asyncio.wait_for(handler.calls.get(), BOUND_S) for _ in range(2)}
        assert begun == {"background", "invoke ping"}
    assert handler.stopped == begun
    assert node.dispatcher.inflight == 0
    assert (await end.receive("bye")).payload == {"reason": "shutting_down"}


WHERE = 'relay = "http://127.0.0.1:9"\nbroker = "127.0.0.1:9"\nloopback_port = 0\n'


class Daemon:
    """A daemon in a process of its own, with a file of settings."""

    def __init__(self, process: subprocess.Popen[str], file: Path) -> None:
        self.process = process
        self._file = file

    def lines_until(self, event: str) -> list[dict[str, Any]]:
        """Return the lines of the log up to the next one of ``event``."""
        assert self.process.stderr is not None
        found = []
        for text in self.process.stderr:
            found.append(json.loads(text))
            if found[-1]["event"] == event:
                return found
        raise AssertionError(f"the daemon ended before {event!r}: {found}")

    def reload(self, settings: str, where: str = WHERE) -> None:
        """Write a file, and ask the daemon to read it."""
        self._file.write_text(where + settings)
        self.process.send_signal(signal.SIGHUP)


@pytest.fixture
def daemon(tmp_path: Path, node_of_today: SimulatedNode) -> Iterator[Daemon]:
    write_identity(tmp_path / "state", node_of_today)
    file = tmp_path / "kubelet.toml"
    file.write_text(WHERE)
    file.chmod(0o600)
    command = [sys.executable, "-P", "-m", "kubelet", "run", "--config", str(file)]
    with subprocess.Popen(
        [*command, "--state-dir", str(tmp_path / "state")], stderr=subprocess.PIPE, text=True
    ) as process:
        running = Daemon(process, file)
        running.lines_until("kubelet started")
        yield running
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=BOUND_S)
        assert process.returncode == 0


def settings_in(lines: list[dict[str, Any]], event: str) -> list[str]:
    return [line["setting"] for line in lines if line["event"] == event]


def test_what_reloads_is_applied_and_what_does_not_is_named(daemon: Daemon) -> None:
    relays = WHERE.replace('"http://127.0.0.1:9"', '["http://127.0.0.1:9", "http://127.0.0.1:10"]')
    daemon.reload('ttl = "1h"\nheartbeat = "5m"\nsocket = "/nowhere"\n', relays)
    lines = daemon.lines_until("settings read again")
    assert settings_in(lines, "setting reloaded") == ["heartbeat", "ttl"]
    assert settings_in(lines, "setting needs a restart") == ["relay", "socket"]
    daemon.reload("")
    lines = daemon.lines_until("settings read again")
    assert settings_in(lines, "setting reloaded") == ["heartbeat", "ttl"]
    assert settings_in(lines, "setting needs a restart") == []


def test_a_broken_file_changes_nothing_and_says_so(daemon: Daemon) -> None:
    daemon.reload('ttl = "1h"\ntll = 1\n')
    problems = daemon.lines_until("settings not reloaded")[-1]["problems"]
    assert len(problems) == 1
    assert "there is no setting tll; the nearest is ttl" in problems[0]
    daemon.reload('ttl = "90s"\n')  # less than two heartbeats
    assert "two heartbeats" in daemon.lines_until("settings not reloaded")[-1]["problems"][0]
    daemon.reload("")
    assert daemon.lines_until("settings read again")[-1]["changed"] == 0


def test_a_table_of_the_ceiling_is_applied_and_one_that_cannot_be_used_changes_nothing(
    daemon: Daemon,
) -> None:
    daemon.reload('["linux.units"]\nunits = ["nginx*"]\n')
    lines = daemon.lines_until("settings read again")
    assert settings_in(lines, "setting reloaded") == ["linux.units"]
    daemon.reload('["linux.units"]\nunits = ["nginx*", 1]\n["linux.journal"]\nunits = []\n')
    [problem] = daemon.lines_until("settings not reloaded")[-1]["problems"]
    assert "linux.units units is an array of patterns" in problem
    daemon.reload("")
    assert settings_in(daemon.lines_until("settings read again"), "setting reloaded") == ["linux.units"]


def test_the_log_level_is_lowered_and_raised_again(daemon: Daemon) -> None:
    daemon.reload('log_level = "warning"\nsocket = "/nowhere"\n')
    lines = daemon.lines_until("setting needs a restart")
    assert settings_in(lines, "setting reloaded") == []
    daemon.reload("")
    assert settings_in(daemon.lines_until("settings read again"), "setting reloaded") == ["log_level"]
