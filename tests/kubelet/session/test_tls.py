"""A node over TLS: whom it believes and what it shows, against real brokers and a real server."""

import asyncio
import os
import ssl
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from websockets.asyncio.server import serve

from kubelet.announce.mqtt import MqttPublisher, publish_all
from kubelet.session.channel import open_channel
from kubelet.session.relay_addresses import RelayAddress
from kubelet.session.tls import NodeTls
from relay.pki.broker_access import BrokerAccess
from schemas.addresses import BrokerAddress
from schemas.frames import FrameReader
from schemas.identity_files import IdentityFiles
from schemas.process.logs import make_logger
from schemas.registry import SchemaRegistry
from schemas.ulids import UlidSource
from tests.fakes.broker import BOUND_S
from tests.fakes.chance import short_waits
from tests.fakes.lines import LogLines
from tests.fakes.node import write_identity
from tests.fakes.server_ca import SimulatedServerCa, server_key_named
from tests.fakes.signer import NODE_ID, OTHER_NODE_ID, SimulatedCa, key_named
from tests.fakes.tls_broker import Peer, PlayedAuthority, TlsBroker

NOW_MS = time.time_ns() // 1_000_000
URL, PLAIN_URL = "https://relay.example", "http://127.0.0.1:8700"
SECURE, PLAIN = BrokerAddress("mqtt.example", 8883, tls=True), BrokerAddress("127.0.0.1", 1883)
TOPIC = f"$devices/{NODE_ID}/announce"


@pytest.fixture
def authority(tmp_path: Path) -> PlayedAuthority:
    return PlayedAuthority(tmp_path, NOW_MS)


@pytest.fixture
def files(authority: PlayedAuthority, tmp_path: Path) -> IdentityFiles:
    files = write_identity(tmp_path / "node", authority.ca.issue(now_ms=NOW_MS))
    files.server_roots.write_text(authority.servers.root_pem)
    return files


@pytest.fixture
def machine_trusts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> SimulatedCa:
    """Another root, which this machine trusts and nothing else."""
    root = SimulatedCa("a root of the world", NOW_MS)
    (tmp_path / "world.pem").write_text(root.root_pem)
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "world.pem"))
    monkeypatch.setenv("SSL_CERT_DIR", str(tmp_path / "nowhere"))
    return root


def names_of(context: ssl.SSLContext | None) -> list[object]:
    assert context is not None
    return [dict(pair[0] for pair in ca["subject"])["commonName"] for ca in context.get_ca_certs()]  # type: ignore[misc]


def test_what_is_not_over_tls_has_no_context(files: IdentityFiles) -> None:
    for own_root in (True, False):
        tls = NodeTls(files, own_root=own_root)
        assert tls.to_relay(PLAIN_URL) is None
        assert tls.to_broker(PLAIN) is None


@pytest.mark.usefixtures("machine_trusts")
def test_a_node_believes_its_own_root_alone_or_those_of_the_machine(files: IdentityFiles) -> None:
    assert names_of(NodeTls(files, own_root=True).to_relay(URL)) == ["root of today's servers"]
    assert names_of(NodeTls(files, own_root=False).to_relay(URL)) == ["a root of the world"]


def test_a_root_that_was_added_counts_from_the_next_connection_on(files: IdentityFiles) -> None:
    tls = NodeTls(files, own_root=True)
    new = SimulatedCa("root of tomorrow", NOW_MS)
    with files.server_roots.open("a") as roots:
        roots.write(new.root_pem)
    assert names_of(tls.to_relay(URL)) == ["root of today's servers", "root of tomorrow"]


def test_a_node_that_was_not_told_of_roots_of_servers_yet_believes_the_root_of_its_leaf(
    files: IdentityFiles,
) -> None:
    files.server_roots.unlink()
    assert names_of(NodeTls(files, own_root=True).to_relay(URL)) == ["root of today"]


def test_a_node_without_a_root_trusts_no_server_and_not_the_roots_of_the_machine(
    files: IdentityFiles,
) -> None:
    files.server_roots.unlink()
    files.root_certificate.unlink()
    with pytest.raises(FileNotFoundError):
        NodeTls(files, own_root=True).to_relay(URL)


# --- the broker ---------------------------------------------------------------------------------------


@pytest.fixture
def broker(broker_kind: str, authority: PlayedAuthority, tmp_path: Path) -> Iterator[TlsBroker]:
    broker = TlsBroker(broker_kind, tmp_path, authority.server("edge-broker"))
    authority.nodes = {NODE_ID, OTHER_NODE_ID}
    BrokerAccess(authority, broker.edge, broker.pid_file, make_logger("kubelet", LogLines())).refresh()
    broker.start()
    try:
        yield broker
    finally:
        broker.stop()


def listening_relay(authority: PlayedAuthority, broker: TlsBroker) -> Peer:
    peer = Peer(broker.address, authority.relay_context())
    assert peer.subscribe("$devices/+/announce")
    return peer


def publisher_to(broker: BrokerAddress, log: LogLines, tls: ssl.SSLContext | None) -> MqttPublisher:
    return MqttPublisher(broker, "a-node", make_logger("kubelet", log), short_waits(), tls)


async def published(publisher: MqttPublisher, payload: bytes) -> bool:
    """Publish as soon as there is a connection; tell whether the broker confirmed it."""
    return await publish_all(publisher, [(TOPIC, payload)], BOUND_S)


@pytest.mark.parametrize("own_root", [True, False], ids=["own root", "a relay with a public certificate"])
@pytest.mark.usefixtures("machine_trusts")
async def test_a_node_is_known_to_the_broker_by_its_leaf(
    authority: PlayedAuthority, broker: TlsBroker, files: IdentityFiles, log: LogLines, *, own_root: bool
) -> None:
    relay = await asyncio.to_thread(listening_relay, authority, broker)
    tls = NodeTls(files, own_root=own_root).to_broker(broker.address)
    assert await published(publisher_to(broker.address, log, tls), b"announced")
    assert await asyncio.to_thread(relay.next) == (TOPIC, b"announced")
    relay.close()


async def test_a_renewed_leaf_is_shown_at_the_next_connection(
    authority: PlayedAuthority, broker: TlsBroker, files: IdentityFiles, log: LogLines
) -> None:
    relay = await asyncio.to_thread(listening_relay, authority, broker)
    tls = NodeTls(files, own_root=True).to_broker(broker.address)
    assert await published(publisher_to(broker.address, log, tls), b"before")
    # Another node's, so that the broker tells them apart by what they may write.
    key = key_named(f"node {OTHER_NODE_ID}")
    files.write(OTHER_NODE_ID, key, authority.ca.issue(OTHER_NODE_ID, now_ms=NOW_MS).leaf_pem)
    await published(publisher_to(broker.address, log, tls), b"as another")
    other = Peer(broker.address, authority.context_of(authority.node(OTHER_NODE_ID)))
    await asyncio.to_thread(other.publish, f"$devices/{OTHER_NODE_ID}/announce", b"the end")
    assert await asyncio.to_thread(relay.next) == (TOPIC, b"before")
    assert await asyncio.to_thread(relay.next) == (f"$devices/{OTHER_NODE_ID}/announce", b"the end")
    for peer in (relay, other):
        peer.close()


# paho forgets to close a socket whose handshake failed.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.usefixtures("machine_trusts")
async def test_a_broker_that_is_not_believed_is_told_nothing(
    broker: TlsBroker, files: IdentityFiles, log: LogLines
) -> None:
    files.root_certificate.write_text(SimulatedCa("a foreign root").root_pem)
    files.server_roots.write_text(SimulatedServerCa("a foreign root of servers").root_pem)
    tls = NodeTls(files, own_root=False).to_broker(broker.address)
    publisher = publisher_to(broker.address, log, tls)
    publisher.start()
    line = await log.until("broker not reached")
    await publisher.stop()
    assert "certificate" in line["reason"]
    assert not publisher.connected


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.filterwarnings("ignore::ResourceWarning")
async def test_files_that_went_missing_are_waited_for(
    broker: TlsBroker, files: IdentityFiles, log: LogLines
) -> None:
    aside = files.leaf.with_suffix(".aside")
    files.leaf.rename(aside)
    tls = NodeTls(files, own_root=True).to_broker(broker.address)
    publisher = publisher_to(broker.address, log, tls)
    publisher.start()
    await log.until("broker not reached")
    aside.rename(files.leaf)
    await log.until("broker connected")
    await publisher.stop()


@pytest.mark.integration
async def test_whichever_relay_is_reached_its_certificate_is_for_the_fleets_name(
    files: IdentityFiles, authority: PlayedAuthority, tmp_path: Path, registry: SchemaRegistry
) -> None:
    names: list[str | None] = []
    outcomes = {}
    for host in ("relay.example", "other.example"):
        key = server_key_named(host)
        shown = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()).decode()
        shown += authority.servers.issue("relay", [host], key.public_key(), now_ms=NOW_MS)
        (tmp_path / host).write_text(shown)
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(tmp_path / host)
        context.sni_callback = lambda _socket, name, _context: names.append(name)
        async with serve(lambda _socket: asyncio.sleep(0), "127.0.0.1", 0, ssl=context) as server:
            at = f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            tls = NodeTls(files, own_root=True).to_relay(URL)
            ulids = UlidSource(lambda: NOW_MS, os.urandom)
            try:
                async with open_channel(URL, RelayAddress(at), tls, FrameReader(registry), ulids, BOUND_S):
                    outcomes[host] = "connected"
            except ssl.SSLCertVerificationError as error:
                outcomes[host] = f"error {error.verify_code}"
    hostname_mismatch = "error 62"
    assert outcomes == {"relay.example": "connected", "other.example": hostname_mismatch}
    assert names == ["relay.example"] * 2
