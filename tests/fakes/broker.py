"""A real broker for a test, ``nats-server`` or ``mosquitto``, in a process of its own.

Each runs with the configuration that ships in ``docs/brokers``, with only ports and directories put in.
"""

import os
import shutil
import socket
import subprocess
import threading
import time
from pathlib import Path

import paho.mqtt.client as paho
from paho.mqtt.enums import CallbackAPIVersion

from relay.broker.nats_server import find_nats_server
from schemas.addresses import BrokerAddress
from schemas.manifest import MAX_MANIFEST_BYTES
from tests.fakes.ports import unused_port

KINDS = ("nats-server", "mosquitto")
INSTALL = "apt-get install --no-install-recommends mosquitto"
BOUND_S = 30

_POLL_S = 0.01
SHIPPED = Path(__file__).parent.parent.parent / "docs" / "brokers"
_PUT_IN = {
    "nats-server": {
        "127.0.0.1:1883": "127.0.0.1:{port}",
        "127.0.0.1:4222": "127.0.0.1:-1",
        "/var/lib/nats/jetstream": "{store}",
    },
    "mosquitto": {"listener 1883 ": "listener {port} ", "/var/lib/mosquitto/": "{store}/"},
}
# As root, mosquitto would become another user, who may not write below a test's directory.
_BESIDES = {"nats-server": "", "mosquitto": "user root\n"}
_DEAF = {
    "nats-server": """\
accounts { A { jetstream: enabled, users: [{
  user: guest, password: guest, permissions: { subscribe: { deny: ["$devices.>"] } }
}] } }
no_auth_user: guest
""",
    # Not an acl_file, which refuses no subscription.
    "mosquitto": "plugin {plugin}\nplugin_opt_config_file {rules}\n",
}
_DEAF_RULES = '{"defaultACLAccess": {"publishClientSend": true, "subscribe": false}}'
_MUTE = {
    "nats-server": _DEAF["nats-server"].replace("subscribe", "publish"),
    "mosquitto": _DEAF["mosquitto"],
}
_MUTE_RULES = (
    '{"defaultACLAccess": {"publishClientSend": false, "publishClientReceive": true, "subscribe": true}}'
)


def missing(kind: str) -> str | None:
    """Return why a broker of this kind cannot be run, or None if it can."""
    if kind == "mosquitto" and _mosquitto() is None:
        return f"not installed: mosquitto. Run: {INSTALL}"
    return None


def shipped_config(kind: str, port: int, store: Path) -> str:
    """Return the configuration that ships, but for ``port`` and ``store``."""
    config = (SHIPPED / f"{kind}.conf").read_text("utf-8")
    for theirs, ours in _PUT_IN[kind].items():
        count = config.count(theirs)
        assert count == 1, f"{kind}.conf holds {theirs!r} {count} times: which is to be replaced?"
        config = config.replace(theirs, ours.format(port=port, store=store))
    return config


class Broker:
    """A broker that keeps its messages in ``directory``, and its address when it is started again.

    ``deaf``: it refuses every subscription to what the devices publish. ``mute``: what they publish.
    ``small``: a nats-server with room for 1 MB.
    """

    def __init__(
        self, kind: str, directory: Path, *, deaf: bool = False, mute: bool = False, small: bool = False
    ) -> None:
        self.address = BrokerAddress("127.0.0.1", unused_port())
        self._kind = kind
        self._directory = directory
        self._deaf = deaf
        self._mute = mute
        self._small = small
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start, and return when it accepts connections and signals.

        mosquitto listens before it handles signals: SIGHUP would end it until it says that it runs.
        """
        config = self._directory / "broker.conf"
        config.write_text(self._config(), "utf-8")
        with (self._directory / "broker.log").open("ab") as log:
            already = log.tell()
            command = [_program(self._kind), "-c", str(config)]
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        give_up = time.monotonic() + BOUND_S
        while self._process.poll() is None and time.monotonic() < give_up:
            try:
                socket.create_connection((self.address.host, self.address.port), 1).close()
                if self._kind == "nats-server" or self._said(b" running\n", already):
                    return
            except OSError:
                pass
            time.sleep(_POLL_S)  # a program says in no other way that it listens
        self.stop()
        raise AssertionError((self._directory / "broker.log").read_text("utf-8"))

    def stop(self) -> None:
        """End the process that ``start`` started."""
        if self._process is not None:
            self._process.terminate()
            self._process.wait(BOUND_S)
            self._process = None

    def lose_all(self) -> None:
        """Delete what it keeps, while it is stopped."""
        shutil.rmtree(self._directory / "store")

    def _said(self, text: bytes, since: int) -> bool:
        return text in (self._directory / "broker.log").read_bytes()[since:]

    def _config(self) -> str:
        store = self._directory / "store"
        store.mkdir(exist_ok=True)
        config = shipped_config(self._kind, self.address.port, store) + _BESIDES[self._kind]
        if self._small:
            config = config.replace("max_file_store: 1GB", "max_file_store: 1MB")
        if not (self._deaf or self._mute):
            return config
        refusal = (_MUTE if self._mute else _DEAF)[self._kind]
        if self._kind == "nats-server":
            return config + refusal
        rules = self._directory / "rules.json"
        rules.write_text(_MUTE_RULES if self._mute else _DEAF_RULES, "utf-8")
        return config + refusal.format(plugin=_dynamic_security(), rules=rules)


def publish(address: BrokerAddress, *messages: tuple[str, bytes], retain: bool = True) -> None:
    """Publish each ``(topic, payload)`` in order, and return when the broker has them all."""
    client = paho.Client(CallbackAPIVersion.VERSION2)
    client.connect(address.host, address.port)
    client.loop_start()
    try:
        sent = [client.publish(topic, payload, qos=1, retain=retain) for topic, payload in messages]
        for message in sent:
            message.wait_for_publish(BOUND_S)
            assert message.is_published()
    finally:
        client.disconnect()
        client.loop_stop()


def fill(address: BrokerAddress) -> None:
    """Retain messages until the broker, whose store is full, hangs up."""
    client, gone = paho.Client(CallbackAPIVersion.VERSION2, reconnect_on_failure=False), threading.Event()
    client.on_disconnect = lambda *_: gone.set()
    client.connect(address.host, address.port)
    client.loop_start()
    for number in range(64):
        client.publish(f"$devices/{number}/announce", bytes(MAX_MANIFEST_BYTES), qos=1, retain=True)
    assert gone.wait(BOUND_S)
    client.loop_stop()


def _program(kind: str) -> str:
    return (_mosquitto() or kind) if kind == "mosquitto" else str(find_nats_server())


def _mosquitto() -> str | None:
    # Debian puts it where the PATH of an ordinary user does not look.
    path = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/local/sbin", "/usr/sbin"])
    return shutil.which("mosquitto", path=path)


def _dynamic_security() -> Path:
    """Return the plugin that lets mosquitto refuse a subscription; it comes in the same package."""
    name = "mosquitto_dynamic_security.so"
    return next(found for pattern in ("lib*", "lib*/*") for found in Path("/usr").glob(f"{pattern}/{name}"))
