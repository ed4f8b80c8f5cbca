"""How long a relay that starts again takes to verify a fleet from what its broker retains.

On nats-server, and on mosquitto with the configuration in ``docs/brokers``, to which the same messages are
copied; on each with the leaves whose verification the relay has kept, and without.
"""

import asyncio
import json
import shutil
import sqlite3
import threading
from contextlib import closing
from datetime import datetime
from pathlib import Path

import paho.mqtt.client as paho
from paho.mqtt.enums import CallbackAPIVersion

from bench.large_fleet import LargeFleet
from bench.results import Figure
from schemas import topics

_SHIPPED = Path(__file__).parents[1] / "docs" / "brokers" / "mosquitto.conf"
_COPY_TIMEOUT_S = 60
_SUBSCRIBED = "broker connected"


async def measure_inventory(fleet: LargeFleet) -> list[Figure]:
    """Return ``inventory_10k_s`` of both brokers, with kept verifications and without."""
    figures = await _measured(fleet, fleet.plan.broker_port, "nats")
    program = shutil.which("mosquitto", path="/usr/sbin:/usr/bin:/usr/local/sbin")
    if program is None:
        return figures
    port = fleet.processes.ports.take()
    await fleet.processes.start("mosquitto", [program, "-c", str(_config(fleet.plan.directory, port))])
    await fleet.processes.until_listening(port)
    await asyncio.to_thread(_copy, fleet.plan.broker_port, port, 2 * fleet.nodes)
    return figures + await _measured(fleet, port, "mosquitto")


async def _measured(fleet: LargeFleet, broker_port: int, name: str) -> list[Figure]:
    kept_s = await _seconds(fleet, broker_port)
    await fleet.processes.stop("relay")
    with closing(sqlite3.connect(fleet.plan.state.marks / "marks.sqlite3")) as database, database:
        database.execute("DELETE FROM leaves")
    fresh_s = await _seconds(fleet, broker_port)
    return [
        Figure(f"inventory_10k_s_{name}", fresh_s, "s", "wanted", 10.0, "<= 10"),
        Figure(f"inventory_10k_s_{name}_kept", kept_s, "s", "without kept leaves", fresh_s, "<= 5"),
    ]


async def _seconds(fleet: LargeFleet, broker_port: int) -> float:
    """Start the relay again, and return the time from its subscription until all manifests are verified."""
    if fleet.processes.is_running("relay"):
        await fleet.processes.stop("relay")
    log = fleet.processes.log("relay")
    before = log.stat().st_size
    await fleet.start_relay(broker_port)
    ended_s = await fleet.until(
        'edge_relay_manifests_total{outcome="accepted"', lambda count: count >= fleet.nodes
    )
    with log.open("rb") as lines:
        lines.seek(before)
        events = [json.loads(line) for line in lines]
    subscribed = next(event["ts"] for event in events if event["event"] == _SUBSCRIBED)
    return ended_s - datetime.fromisoformat(subscribed).timestamp()


def _config(directory: Path, port: int) -> Path:
    """Write the shipped configuration with a port and a directory of this run."""
    store = directory / "mosquitto"
    store.mkdir()
    text = _SHIPPED.read_text("utf-8")
    for shipped, ours in (("listener 1883 ", f"listener {port} "), ("/var/lib/mosquitto/", f"{store}/")):
        if shipped not in text:
            raise RuntimeError(f"{_SHIPPED} has no {shipped!r}")
        text = text.replace(shipped, ours)
    config = directory / "mosquitto.conf"
    # As root, mosquitto would become another user, who may not write there.
    config.write_text(f"{text}user root\n", "utf-8")
    return config


def _copy(source: int, target: int, count: int) -> None:
    """Publish what ``source`` retains of the devices on ``target``: ``count`` messages."""
    got = threading.Semaphore(0)
    reader, writer = (paho.Client(CallbackAPIVersion.VERSION2, protocol=paho.MQTTv311) for _ in range(2))
    writer.max_queued_messages_set(0)
    writer.connect("127.0.0.1", target)
    writer.loop_start()
    sent: list[paho.MQTTMessageInfo] = []

    def on_message(_client: paho.Client, _data: object, message: paho.MQTTMessage) -> None:
        if message.retain:
            sent.append(writer.publish(message.topic, message.payload, qos=1, retain=True))
            got.release()

    reader.on_message = on_message
    reader.connect("127.0.0.1", source)
    reader.loop_start()
    reader.subscribe([(topics.ALL_IDENTITIES, 0), (topics.ALL_ANNOUNCES, 0)])
    for _ in range(count):
        if not got.acquire(timeout=_COPY_TIMEOUT_S):
            raise RuntimeError("the broker does not retain the whole fleet")
    for info in sent:
        info.wait_for_publish(_COPY_TIMEOUT_S)
    for client in (reader, writer):
        client.disconnect()
        client.loop_stop()
