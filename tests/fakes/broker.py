"""A real broker for a test: ``nats-server``, its MQTT side, in a process of its own."""

import json
import socket
import subprocess
import time
from pathlib import Path

import paho.mqtt.client as paho
from paho.mqtt.enums import CallbackAPIVersion

from relay.processes import find_program, free_port
from schemas.addresses import HostPort

BOUND_S = 20
_POLL_S = 0.01
_CONFIG = """\
server_name: test
listen: "127.0.0.1:-1"
jetstream {{ store_dir: {store} }}
mqtt {{ listen: "127.0.0.1:{port}" }}
{extra}
"""
DEAF = """\
accounts { A { jetstream: enabled, users: [{
  user: guest, password: guest, permissions: { subscribe: { deny: ["$devices.>"] } }
}] } }
no_auth_user: guest
"""
"""What a broker's configuration says besides when nobody may read what the devices publish."""


class Broker:
    """A broker that keeps its messages in ``directory``, and its address when it is started again."""

    def __init__(self, directory: Path, extra: str = "") -> None:
        self.address = HostPort("127.0.0.1", free_port(0))
        self._directory = directory
        self._extra = extra
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start, and return when it accepts connections."""
        config = self._directory / "broker.conf"
        store = json.dumps(str(self._directory / "store"))
        config.write_text(_CONFIG.format(store=store, port=self.address.port, extra=self._extra), "utf-8")
        with (self._directory / "broker.log").open("ab") as log:
            command = [find_program("nats-server"), "-c", str(config)]
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        give_up = time.monotonic() + BOUND_S
        while self._process.poll() is None and time.monotonic() < give_up:
            try:
                socket.create_connection((self.address.host, self.address.port), 1).close()
            except OSError:
                time.sleep(_POLL_S)  # a program says in no other way that it listens
            else:
                return
        self.stop()
        raise AssertionError((self._directory / "broker.log").read_text("utf-8"))

    def stop(self) -> None:
        """End the process that ``start`` started."""
        if self._process is not None:
            self._process.terminate()
            self._process.wait(BOUND_S)
            self._process = None


def publish(address: HostPort, *messages: tuple[str, bytes], retain: bool = True) -> None:
    """Publish each ``(topic, payload)`` in order, and return when the broker has them all."""
    client = paho.Client(CallbackAPIVersion.VERSION2)
    client.connect(address.host, address.port)
    client.loop_start()
    try:
        for topic, payload in messages:
            client.publish(topic, payload, qos=1, retain=retain).wait_for_publish(BOUND_S)
    finally:
        client.disconnect()
        client.loop_stop()
