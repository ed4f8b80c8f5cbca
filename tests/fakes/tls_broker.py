"""A real broker that identifies each client by certificate, run with the configuration that ships for that.

Beside it an authority that says what the test wants to be true, and clients that wait for what happens.
"""

import queue
import shutil
import ssl
import threading
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import paho.mqtt.client as paho
from paho.mqtt.enums import CallbackAPIVersion, MQTTProtocolVersion

from relay.pki.issuing import issue_client, make_crl
from relay.pki.roots import server_key_to_pem
from schemas.addresses import BrokerAddress
from schemas.certificates import RELAY_NAME, RELAY_URI
from schemas.files import PRIVATE, write_atomic
from schemas.keys import private_key_to_pem
from schemas.tls import client_context
from tests.fakes.broker import BOUND_S, SHIPPED, Broker
from tests.fakes.ports import unused_port
from tests.fakes.server_ca import SimulatedServerCa, server_key_named
from tests.fakes.signer import SimulatedCa, SimulatedNode, key_named

_PUT_IN = {
    "nats-server": {
        "0.0.0.0:8883": "127.0.0.1:{port}",
        "127.0.0.1:4222": "127.0.0.1:{own_port}",
        "/etc/nats/edge/": "{edge}/",
        "/var/lib/nats/jetstream": "{store}",
        "/run/nats/nats-server.pid": "{pid_file}",
    },
    "mosquitto": {
        "listener 8883": "listener {port} 127.0.0.1",
        "/etc/mosquitto/edge/": "{edge}/",
        "/var/lib/mosquitto/": "{store}/",
        "/run/mosquitto/mosquitto.pid": "{pid_file}",
    },
}
# As root, mosquitto would become another user, who may not write below a test's directory.
_POLL_S = 0.01
_BESIDES = {"nats-server": "", "mosquitto": "user root\n"}


@dataclass(frozen=True)
class Shown:
    """A certificate and its key, as files."""

    certificate: Path
    key: Path


class PlayedAuthority:
    """An authority that is as the test wants it; everything that it signs is real.

    Attributes:
        nodes: those in force.
        readers_in_force: names of readers.
        revoked: the serial numbers of the leaves that are not any longer.
        cas: those whose roots are trusted, the oldest first.
        servers: the part that issues for servers.
    """

    def __init__(self, directory: Path, now_ms: int) -> None:
        self.ca = SimulatedCa("root of today", now_ms)
        self.cas = [self.ca]
        self.servers = SimulatedServerCa("root of today's servers", now_ms)
        self.nodes: set[str] = set()
        self.readers_in_force: list[str] = []
        self.revoked: list[int] = []
        self._directory = directory
        self._now_ms = now_ms
        self._serial = 1_000_000

    def roots(self) -> list[str]:
        return [ca.root_pem for ca in self.cas]

    def crl_pem(self) -> str:
        return "".join(
            make_crl(ca.root_pem, ca.key, self.revoked, self._now_ms, len(self.revoked)) for ca in self.cas
        )

    def in_force(self) -> dict[str, Any]:
        return dict.fromkeys(self.nodes)

    def readers(self) -> list[str]:
        return self.readers_in_force

    def issue_client(self, name: str, uri: str, public_key: bytes, valid_days: int) -> str:
        self._serial += 1
        ca = self.cas[0]
        return issue_client(
            ca.root_pem,
            ca.key,
            name=name,
            uri=uri,
            public_key=public_key,
            now_ms=self._now_ms,
            valid_days=valid_days,
            serial=self._serial,
        )

    def node(self, node_id: str, ca: SimulatedCa | None = None) -> Shown:
        """Return what a node with that id would show, enrolled or not."""
        node = (ca or self.ca).issue(node_id, now_ms=self._now_ms)
        return self.files_of(node)

    def files_of(self, node: SimulatedNode) -> Shown:
        """Write down what ``node`` shows."""
        shown = self._shown(f"{node.node_id}-{node.kid[:8]}")
        write_atomic(shown.certificate, node.leaf_pem)
        write_atomic(shown.key, private_key_to_pem(node.key), PRIVATE)
        return shown

    def server(self, name: str) -> Shown:
        """Return what a server on this machine shows."""
        key, shown = server_key_named(name), self._shown(name)
        hosts = ["localhost", "127.0.0.1"]
        write_atomic(shown.certificate, self.servers.issue(name, hosts, key.public_key()))
        write_atomic(shown.key, server_key_to_pem(key), PRIVATE)
        return shown

    def relay(self) -> Shown:
        """Return what the relay shows to the broker."""
        return self.client(RELAY_NAME, RELAY_URI)

    def client(self, name: str, uri: str) -> Shown:
        """Return what a client of that name shows, which is no node."""
        key, shown = key_named(name), self._shown(name)
        pem = self.issue_client(name, uri, bytes(key.verify_key), 90)
        write_atomic(shown.certificate, pem)
        write_atomic(shown.key, private_key_to_pem(key), PRIVATE)
        return shown

    def context_of(self, shown: Shown | None) -> ssl.SSLContext:
        """Return the context of a client that shows this, and believes the root of servers."""
        return client_context(self.servers.root_pem, (shown.certificate, shown.key) if shown else None)

    def relay_context(self) -> ssl.SSLContext:
        return self.context_of(self.relay())

    def _shown(self, name: str) -> Shown:
        return Shown(self._directory / f"{name}.pem", self._directory / f"{name}.key")


class TlsBroker(Broker):
    """A broker over TLS in ``directory``; ``BrokerAccess`` writes whom it admits into its ``edge``."""

    def __init__(self, kind: str, directory: Path, certificate: Shown | None = None) -> None:
        super().__init__(kind, directory)
        self.kind = kind
        self.address = BrokerAddress("127.0.0.1", unused_port(), tls=True)
        self.own_port = unused_port()
        self.edge = directory / "edge"
        self.pid_file = directory / "broker.pid"
        self.edge.mkdir(exist_ok=True)
        if certificate is not None:
            shutil.copy(certificate.certificate, self.edge / "server.pem")
            shutil.copy(certificate.key, self.edge / "server.key")
        shutil.copy(SHIPPED / "mosquitto.acl", self.edge)

    def _config(self) -> str:
        store = self.edge.parent / "store"
        store.mkdir(exist_ok=True)
        config = (SHIPPED / f"{self.kind}-tls.conf").read_text("utf-8")
        places = {"port": self.address.port, "own_port": self.own_port, "edge": self.edge, "store": store}
        for theirs, ours in _PUT_IN[self.kind].items():
            assert theirs in config, f"{self.kind}-tls.conf holds no {theirs!r}"
            config = config.replace(theirs, ours.format(**places, pid_file=self.pid_file))
        return config + _BESIDES[self.kind]


class Peer:
    """An MQTT client that is connected once, or not; the broker is to remember one that is ``remembered_as``.

    Attributes:
        answer: what the broker said to its CONNECT, None if it closed instead.
        messages: topic and payload of what came.
    """

    def __init__(
        self,
        address: BrokerAddress,
        tls: ssl.SSLContext,
        *,
        username: str | None = None,
        will: str | None = None,
        remembered_as: str = "",
    ) -> None:
        self.answer: str | None = None
        self.messages: queue.Queue[tuple[str, bytes]] = queue.Queue()
        self.gone = threading.Event()
        self._settled = threading.Event()
        self._granted: queue.Queue[bool] = queue.Queue()
        self._client = paho.Client(
            CallbackAPIVersion.VERSION2,
            client_id=remembered_as,
            clean_session=not remembered_as,
            protocol=MQTTProtocolVersion.MQTTv311,
            reconnect_on_failure=False,
        )
        self._client.tls_set_context(tls)
        if username is not None:
            self._client.username_pw_set(username, "")
        if will is not None:
            self._client.will_set(will, b"a will", qos=1, retain=True)
        self._wire_up()
        if self._reaches(address):
            self._client.loop_start()
            assert self._settled.wait(BOUND_S)
        else:
            self.gone.set()

    @property
    def connected(self) -> bool:
        """Whether the broker admitted it and has not disconnected."""
        return self.answer == "Success" and not self.gone.is_set()

    def subscribe(self, *topics: str) -> bool:
        """Subscribe with QoS 1; return whether the broker granted all of it."""
        self._client.subscribe([(topic, 1) for topic in topics])
        return self._granted.get(timeout=BOUND_S)

    def publish(self, topic: str, payload: bytes) -> None:
        """Publish, retained, and return when the broker has confirmed it, whatever that is worth."""
        message = self._client.publish(topic, payload, qos=1, retain=True)
        message.wait_for_publish(BOUND_S)
        assert message.is_published()

    def try_publish(self, topic: str, payload: bytes, *, retain: bool, qos: int = 1) -> None:
        """Publish, and return when the broker has confirmed it or closed."""
        message = self._client.publish(topic, payload, qos=qos, retain=retain)
        give_up = time.monotonic() + BOUND_S
        while not (message.rc or message.is_published() or self.gone.wait(_POLL_S)):
            assert time.monotonic() < give_up

    def next(self) -> tuple[str, bytes]:
        return self.messages.get(timeout=BOUND_S)

    def close(self) -> None:
        """Leave."""
        self._client.disconnect()
        self._client.loop_stop()

    def vanish(self) -> None:
        """Disconnect without DISCONNECT: the broker publishes the will."""
        sock: Any = self._client.socket()
        self._client.loop_stop()
        sock.close()

    def _reaches(self, address: BrokerAddress) -> bool:
        with warnings.catch_warnings():
            # paho forgets to close a socket whose handshake failed.
            warnings.simplefilter("ignore", ResourceWarning)
            try:
                self._client.connect(address.host, address.port)
            except OSError:
                return False
            return True

    def _wire_up(self) -> None:
        def on_connect(_c: object, _d: object, _f: object, code: object, _p: object) -> None:
            self.answer = str(code)
            self._settled.set()

        def on_disconnect(_c: object, _d: object, _f: object, _code: object, _p: object) -> None:
            self.gone.set()
            self._settled.set()

        def on_subscribe(_c: object, _d: object, _m: int, codes: list[Any], _p: object) -> None:
            self._granted.put(not any(code.is_failure for code in codes))

        self._client.on_connect = on_connect
        self._client.on_disconnect = on_disconnect
        self._client.on_subscribe = on_subscribe
        self._client.on_message = lambda _c, _d, message: self.messages.put(
            (message.topic, bytes(message.payload))
        )


def until(connect: Callable[[], Peer], wanted: Callable[[Peer], bool]) -> Peer:
    """Connect until a peer is as ``wanted``: a broker does not say that it has read its files again."""
    give_up = time.monotonic() + BOUND_S
    while time.monotonic() < give_up:
        peer = connect()
        if wanted(peer):
            return peer
        peer.close()
    raise AssertionError("the broker did not come to see it so")
