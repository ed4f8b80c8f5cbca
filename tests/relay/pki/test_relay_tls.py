"""The relay's own certificates, and TLS at its two ends."""

import asyncio
import contextlib
import os
import socket
import ssl
import stat
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePublicKey
from cryptography.x509.oid import ExtendedKeyUsageOID

from relay.pki.authority import CertificateAuthority
from relay.pki.broker_access import BrokerAccess
from relay.pki.errors import AuthorityStateError
from relay.pki.relay_tls import (
    INTERVAL_S,
    Expiries,
    LiveContext,
    OwnCertificate,
    RelayTls,
    WantedCertificate,
    broker_certificate,
    broker_context,
    cluster_certificate,
    issue_for_another_relay,
    reason_to_renew,
    served_certificate,
)
from relay.routing.authority_port import AuthorityUnavailableError
from relay.settings.config import RelayConfig, StateFiles, TlsFiles
from schemas.addresses import BrokerAddress, HostPort, host_of
from schemas.certificates import RELAY_NAME, RELAY_URI, IdentityError, make_csr, verify_leaf, verify_relay
from schemas.files import PRIVATE, ExposedFileError, make_private_directory, write_atomic
from schemas.identity import first_certificate_in, to_pem, validity_of
from schemas.keys import private_key_to_pem
from schemas.process.logs import make_logger
from schemas.tls import TlsFilesError, client_context, load_chain
from tests.fakes.clock import FakeClock
from tests.fakes.environment import config
from tests.fakes.hub import Hub
from tests.fakes.lines import LogLines
from tests.fakes.server_ca import SimulatedServerCa, issue_old_server, server_key_named
from tests.fakes.signer import DAY_MS, NODE_ID, NOW_MS, SimulatedCa, key_named
from tests.fakes.tls_broker import Peer, PlayedAuthority, TlsBroker

URL = "https://relay.example:8443"
CA = SimulatedServerCa()
HOSTS = ("relay.example", "127.0.0.1", "::1")
KEY = server_key_named("relay").public_key()
WANTED = WantedCertificate(RELAY_NAME, frozenset(HOSTS), KEY)
DAYS = 90
HOUR_MS = 3_600_000
TWO_THIRDS_MS = DAYS * DAY_MS * 2 // 3
DAY = timedelta(days=1)


def issued(ca: SimulatedServerCa = CA, *hosts: str) -> str:
    return ca.issue(RELAY_NAME, hosts or HOSTS, KEY, DAYS)


# --- when a certificate will not do any longer --------------------------------------------------------


@pytest.mark.parametrize(
    ("after_ms", "reason"),
    [(-DAY_MS, "age"), (0, None), (TWO_THIRDS_MS - HOUR_MS, None), (TWO_THIRDS_MS + HOUR_MS, "age")],
)
def test_a_certificate_for_what_is_wanted_stays_until_two_thirds_of_its_life(
    after_ms: int, reason: str | None
) -> None:
    assert reason_to_renew(issued(), WANTED, [CA.root_pem], NOW_MS + after_ms) == reason


def test_one_with_a_key_of_an_unknown_kind_is_replaced() -> None:
    der = ssl.PEM_cert_to_DER_cert(issued())
    ec_public_key = bytes.fromhex("2a8648ce3d0201")
    assert ec_public_key in der
    damaged = ssl.DER_cert_to_PEM_cert(der.replace(ec_public_key, bytes.fromhex("2a8648ce3d0209")))
    assert reason_to_renew(damaged, WANTED, [CA.root_pem], NOW_MS) == "none"


@pytest.mark.parametrize("held", ["", "garbage", "\N{SNOWMAN}", CA.root_pem[:200], CA.root_pem])
def test_what_is_no_certificate_of_a_server_is_replaced(held: str) -> None:
    assert reason_to_renew(held, WANTED, [CA.root_pem], NOW_MS) == "none"


@pytest.mark.parametrize(
    "hosts",
    [
        pytest.param(("other.example", "127.0.0.1", "::1"), id="another name"),
        pytest.param(("relay.example", "127.0.0.1"), id="one less"),
        pytest.param(("relay.example", "127.0.0.1", "::1", "localhost"), id="one more"),
    ],
)
def test_it_is_replaced_when_the_hosts_changed(hosts: tuple[str, ...]) -> None:
    wanted = WantedCertificate(RELAY_NAME, frozenset(hosts), KEY)
    assert reason_to_renew(issued(), wanted, [CA.root_pem], NOW_MS) == "names"


def test_how_a_host_is_spelt_is_no_reason() -> None:
    spelt = issued(CA, "0:0:0:0:0:0:0:1", "127.0.0.1", "relay.example")
    assert reason_to_renew(spelt, WANTED, [CA.root_pem], NOW_MS) is None


def test_it_is_replaced_when_it_is_for_another_key_or_name() -> None:
    other_key = WantedCertificate(RELAY_NAME, WANTED.others, server_key_named("another").public_key())
    other_name = WantedCertificate("another", WANTED.others, KEY)
    for wanted in (other_key, other_name):
        assert reason_to_renew(issued(), wanted, [CA.root_pem], NOW_MS) == "another"


def test_it_stays_while_its_root_is_trusted_and_is_replaced_from_then_on() -> None:
    new = SimulatedServerCa("the new root")
    assert reason_to_renew(issued(), WANTED, [new.root_pem, CA.root_pem], NOW_MS) is None
    assert reason_to_renew(issued(), WANTED, [new.root_pem], NOW_MS) == "root"


def test_a_root_of_the_same_name_is_not_the_same_root() -> None:
    namesake = SimulatedServerCa()
    namesake.key = server_key_named("of another server")
    assert reason_to_renew(issued(namesake), WANTED, [CA.root_pem], NOW_MS) == "root"


# --- the files ----------------------------------------------------------------------------------------


@pytest.fixture
def files(tmp_path: Path) -> TlsFiles:
    return TlsFiles(tmp_path / "tls" / "server.pem", tmp_path / "tls" / "server.key")


def held(files: TlsFiles) -> x509.Certificate:
    load_chain(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), files.certificate, files.key)
    return x509.load_pem_x509_certificate(files.certificate.read_bytes())


def own(ca: CertificateAuthority, files: TlsFiles, clock: FakeClock, url: str = URL) -> OwnCertificate:
    return served_certificate(files, ca.servers, RELAY_NAME, [host_of(url)], clock, os.urandom)


def test_a_certificate_is_issued_once_and_is_for_the_url_and_this_machine(
    ca: CertificateAuthority, files: TlsFiles, clock: FakeClock
) -> None:
    assert own(ca, files, clock).renew()
    certificate = held(files)
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert {str(name.value) for name in names} == {"relay.example", "localhost", "127.0.0.1", "::1"}
    assert stat.S_IMODE(files.key.stat().st_mode) == 0o600
    assert stat.S_IMODE(files.key.parent.stat().st_mode) == 0o700
    assert not own(ca, files, clock).renew()
    assert held(files) == certificate


def test_a_relay_with_another_name_has_another_certificate_and_the_same_key(
    ca: CertificateAuthority, files: TlsFiles, clock: FakeClock
) -> None:
    own(ca, files, clock).renew()
    key = files.key.read_bytes()
    assert own(ca, files, clock, "https://[2001:db8::1]").renew()
    names = held(files).extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert "2001:db8::1" in {str(name.value) for name in names}
    assert files.key.read_bytes() == key


def test_a_key_that_others_can_read_is_refused(
    ca: CertificateAuthority, files: TlsFiles, clock: FakeClock
) -> None:
    own(ca, files, clock).renew()
    files.key.chmod(0o640)
    with pytest.raises(ExposedFileError, match="chmod 600"):
        own(ca, files, clock).renew()


def test_it_lives_for_90_days_and_is_for_servers_alone(
    ca: CertificateAuthority, files: TlsFiles, clock: FakeClock
) -> None:
    own(ca, files, clock).renew()
    certificate = held(files)
    life = certificate.not_valid_after_utc - certificate.not_valid_before_utc
    assert 90 * DAY <= life < 91 * DAY
    usages = certificate.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    assert list(usages) == [ExtendedKeyUsageOID.SERVER_AUTH]
    assert isinstance(certificate.public_key(), EllipticCurvePublicKey)


def test_the_broker_is_shown_a_client_s_certificate_of_the_nodes_root_that_is_no_node_s(
    ca: CertificateAuthority, files: TlsFiles, clock: FakeClock
) -> None:
    certificate = broker_certificate(files, ca, clock, os.urandom)
    assert certificate.renew()
    assert not certificate.renew()
    shown = held(files)
    shown.verify_directly_issued_by(x509.load_pem_x509_certificate(ca.root_pem().encode()))
    names = shown.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert [str(name.value) for name in names] == [RELAY_URI]
    assert shown.subject.rfc4514_string() == f"CN={RELAY_NAME}"
    usages = shown.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    assert list(usages) == [ExtendedKeyUsageOID.CLIENT_AUTH]
    assert shown.not_valid_after_utc - shown.not_valid_before_utc < 91 * DAY
    with pytest.raises(IdentityError, match="wrong_form"):
        verify_leaf(files.certificate.read_text(), ca.roots(), NOW_MS)
    clock.advance(61 * DAY_MS)
    assert certificate.renew()


def test_the_other_relays_are_shown_which_one_it_is_by_a_certificate_that_is_for_nothing_else(
    ca: CertificateAuthority, files: TlsFiles, clock: FakeClock
) -> None:
    certificate = cluster_certificate(files, ca, clock, os.urandom)
    assert certificate.renew()
    assert not certificate.renew()
    pem = files.certificate.read_text()
    shown = verify_relay(first_certificate_in(pem), ca.roots(), clock())
    assert shown.valid_at(clock())
    assert held(files).subject.rfc4514_string() == f"CN={shown.name}"
    with pytest.raises(IdentityError, match="wrong_form"):
        verify_leaf(pem, ca.roots(), clock())
    clock.advance(61 * DAY_MS)
    assert cluster_certificate(files, ca, clock, os.urandom).renew()
    renewed = verify_relay(first_certificate_in(files.certificate.read_text()), ca.roots(), clock())
    assert (renewed.name, renewed.public_key) == (shown.name, shown.public_key)
    assert renewed.kid != shown.kid


@pytest.mark.parametrize("what", ["a node's", "the broker's", "another root's", "no certificate"])
def test_no_other_certificate_proves_which_relay_it_is(
    ca: CertificateAuthority, files: TlsFiles, clock: FakeClock, what: str, tmp_path: Path
) -> None:
    match what:
        case "a node's":
            pem = ca.issue(make_csr(key_named(NODE_ID), NODE_ID), "acme")
        case "the broker's":
            broker_certificate(files, ca, clock, os.urandom).renew()
            pem = files.certificate.read_text()
        case "another root's":
            another = CertificateAuthority(tmp_path / "another", clock, os.urandom)
            another.create()
            cluster_certificate(files, another, clock, os.urandom).renew()
            pem = files.certificate.read_text()
        case _:
            pem = to_pem([b"no certificate"])
    with pytest.raises(IdentityError):
        verify_relay(first_certificate_in(pem), ca.roots(), clock())


def test_a_certificate_from_before_there_was_a_root_of_servers_is_replaced_and_its_key_stays(
    ca: CertificateAuthority, files: TlsFiles, clock: FakeClock
) -> None:
    # What the broker was shown then is where its successor is now.
    key, root = key_named("relay"), SimulatedCa()
    old = issue_old_server(
        root.root_pem,
        root.key,
        name=RELAY_NAME,
        hosts=HOSTS,
        public_key=bytes(key.verify_key),
        now_ms=NOW_MS,
        valid_days=397,
        serial=7,
    )
    make_private_directory(files.key.parent)
    write_atomic(files.key, private_key_to_pem(key), PRIVATE)
    write_atomic(files.certificate, old)
    assert broker_certificate(files, ca, clock, os.urandom).renew()
    held(files).verify_directly_issued_by(x509.load_pem_x509_certificate(ca.root_pem().encode()))
    assert files.key.read_text() == private_key_to_pem(key)


BOUND_S = 30
REAL_MS = time.time_ns() // 1_000_000
LOCAL = HostPort("127.0.0.1", 8700)
LOCAL_URL = "https://localhost:8700"
PLAIN_BROKER = BrokerAddress("127.0.0.1", 1883)


class Echo:
    """A server that says back what it is told, over TLS, in lines."""

    def __init__(self, port: int) -> None:
        self._port = port

    @classmethod
    @asynccontextmanager
    async def running(cls, context: ssl.SSLContext) -> AsyncIterator["Echo"]:
        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            while line := await reader.readline():
                writer.write(line)
            writer.close()

        server = await asyncio.start_server(answer, "127.0.0.1", 0, ssl=context)
        async with server, asyncio.timeout(BOUND_S):
            yield cls(server.sockets[0].getsockname()[1])

    async def connect(self, root_pem: str) -> "Line":
        context = client_context(root_pem)
        streams = await asyncio.open_connection("127.0.0.1", self._port, ssl=context)
        return Line(*streams)


class Line:
    """One connection to it."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        der = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
        self.serial = x509.load_der_x509_certificate(der).serial_number

    async def is_alive(self) -> bool:
        self._writer.write(b"there?\n")
        return await self._reader.readline() == b"there?\n"

    def close(self) -> None:
        self._writer.close()


@pytest.fixture
def authority(tmp_path: Path) -> PlayedAuthority:
    return PlayedAuthority(tmp_path, REAL_MS)


@pytest.fixture
def served(authority: PlayedAuthority) -> TlsFiles:
    made = authority.server("relay")
    return TlsFiles(made.certificate, made.key)


# --- the context that is served with ------------------------------------------------------------------


@pytest.mark.integration
async def test_another_certificate_is_shown_from_then_on_and_no_connection_is_closed(
    authority: PlayedAuthority, served: TlsFiles
) -> None:
    live = LiveContext(served)
    async with Echo.running(live.context) as echo:
        old = await echo.connect(authority.servers.root_pem)
        assert not live.refresh()
        authority.server("relay")
        assert live.refresh()
        new = await echo.connect(authority.servers.root_pem)
        assert new.serial != old.serial
        assert await old.is_alive()
        assert await new.is_alive()
        for line in (old, new):
            line.close()


@pytest.mark.integration
@pytest.mark.parametrize("broken", ["certificate", "another", "key", "gone", "exposed"])
async def test_files_that_are_of_no_use_leave_in_use_what_is(
    authority: PlayedAuthority, served: TlsFiles, broken: str
) -> None:
    live = LiveContext(served)
    match broken:
        case "certificate":
            served.certificate.write_text("half a certif")
        case "another":
            served.certificate.write_text(authority.server("another").certificate.read_text())
        case "key":
            served.key.write_text(private_key_to_pem(key_named("of another certificate")))
        case "gone":
            served.certificate.unlink()
        case _:
            served.key.chmod(0o644)
            os.utime(served.key, ns=(0, 0))
    with pytest.raises(OSError, match=r"relay\.(pem|key)|certificate"):
        live.refresh()
    async with Echo.running(live.context) as echo:
        line = await echo.connect(authority.servers.root_pem)
        assert await line.is_alive()
        line.close()


@pytest.mark.parametrize("content", [b"\x30\x2e\xff\xfe", b"", b"no key"])
def test_a_key_that_is_none_is_refused(served: TlsFiles, content: bytes) -> None:
    served.key.write_bytes(content)
    with pytest.raises(TlsFilesError, match=r"relay\.key"):
        LiveContext(served)


def test_a_served_key_that_others_can_read_is_refused(served: TlsFiles) -> None:
    served.key.chmod(0o640)
    with pytest.raises(ExposedFileError, match="chmod 600"):
        LiveContext(served)


# --- a relay's -----------------------------------------------------------------------------------------


async def test_a_relay_without_tls_has_neither_contexts_nor_a_certificate(
    authority: PlayedAuthority, tmp_path: Path
) -> None:
    state = StateFiles(tmp_path / "state")
    config = RelayConfig(PLAIN_BROKER, "http://127.0.0.1:8700", LOCAL, state)
    tls = made(config, authority, FakeClock(REAL_MS), LogLines())
    assert (tls.served, tls.to_broker) == (None, None)
    assert not state.own_tls.certificate.exists()
    await tls.refresh()
    assert not state.own_tls.certificate.exists()


def made(config: RelayConfig, ca: Any, clock: FakeClock, log: LogLines, **more: Any) -> RelayTls:
    return RelayTls(config, ca, now_ms=clock, random_bytes=os.urandom, log=make_logger("relay", log), **more)


@pytest.fixture
def state(tmp_path: Path) -> StateFiles:
    return StateFiles(tmp_path / "state")


def serving(state: StateFiles, broker: BrokerAddress = PLAIN_BROKER) -> RelayConfig:
    """Return the configuration of a relay that serves with a certificate of its own CA."""
    return RelayConfig(broker, LOCAL_URL, LOCAL, state, tls=state.own_tls, own_root=True)


@pytest.mark.integration
async def test_a_relay_with_a_certificate_of_its_own_is_believed_by_its_root(
    authority: PlayedAuthority, state: StateFiles
) -> None:
    tls = made(serving(state), authority, FakeClock(REAL_MS), LogLines())
    assert tls.served is not None
    async with Echo.running(tls.served) as echo:
        line = await echo.connect(authority.servers.root_pem)
        assert await line.is_alive()
        with pytest.raises(ssl.SSLCertVerificationError):
            await echo.connect(SimulatedCa("another", REAL_MS).root_pem)
        line.close()


@pytest.mark.integration
async def test_its_certificate_is_renewed_in_time_and_when_its_root_is_gone(
    authority: PlayedAuthority, state: StateFiles
) -> None:
    clock, log = FakeClock(REAL_MS), LogLines()
    tls = made(serving(state), authority, clock, log)
    assert tls.served is not None
    async with Echo.running(tls.served) as echo:
        first = await echo.connect(authority.servers.root_pem)
        await tls.refresh()
        assert log.entries() == []
        clock.advance(61 * DAY_MS)
        await tls.refresh()
        second = await echo.connect(authority.servers.root_pem)
        assert second.serial != first.serial
        clock.advance(-61 * DAY_MS)
        authority.servers.change_root("the next root")
        await tls.refresh()
        third = await echo.connect(authority.servers.root_pem)
        assert await first.is_alive()
        for line in (first, second, third):
            line.close()
    assert [line["event"] for line in log.entries()] == ["own certificate issued", "certificate loaded"] * 2


async def test_it_looks_from_time_to_time_and_outlives_what_it_finds(
    authority: PlayedAuthority, served: TlsFiles, state: StateFiles
) -> None:
    waits: list[float] = []
    log = LogLines()

    async def sleep(seconds: float) -> None:
        waits.append(seconds)
        match len(waits):
            case 1:
                served.certificate.write_text("half a certif")
            case 2:
                authority.server("relay")
            case 3:
                raise asyncio.CancelledError

    config = RelayConfig(PLAIN_BROKER, LOCAL_URL, LOCAL, state, tls=served)
    tls = made(config, authority, FakeClock(REAL_MS), log, sleep=sleep)
    with contextlib.suppress(asyncio.CancelledError):
        await tls.run()
    assert waits == [INTERVAL_S] * 3
    assert [line["event"] for line in log.entries()] == ["certificate not renewed", "certificate loaded"]


# --- towards the broker -------------------------------------------------------------------------------


def test_the_relay_shows_the_broker_who_it_is_and_believes_its_own_root(
    broker_kind: str, authority: PlayedAuthority, state: StateFiles, tmp_path: Path
) -> None:
    broker = TlsBroker(broker_kind, tmp_path, authority.server("edge-broker"))
    BrokerAccess(authority, broker.edge, None, make_logger("relay", LogLines())).refresh()
    config = RelayConfig(broker.address, "http://127.0.0.1:8700", LOCAL, state)
    tls = made(config, authority, FakeClock(REAL_MS), LogLines())
    assert tls.served is None
    assert tls.to_broker is not None
    shown = x509.load_pem_x509_certificate(state.broker_client_tls.certificate.read_bytes())
    assert shown.subject.rfc4514_string() == f"CN={RELAY_NAME}"
    elsewhere = tmp_path / "elsewhere.pem"
    elsewhere.write_text(SimulatedCa("another", REAL_MS).root_pem)
    broker.start()
    try:
        relay = Peer(broker.address, tls.to_broker)
        assert relay.connected
        assert relay.subscribe("$devices/+/announce")
        relay.close()
        misled = Peer(broker.address, broker_context(state.broker_client_tls, authority.roots, elsewhere))
        assert not misled.connected
        misled.close()
    finally:
        broker.stop()


def test_a_ca_that_cannot_be_read_is_what_the_connection_fails_of_and_no_more(
    tmp_path: Path, served: TlsFiles
) -> None:
    nothing = CertificateAuthority(tmp_path / "nothing", FakeClock(REAL_MS), os.urandom)
    context = broker_context(served, nothing.roots, None)
    one, other = socket.socketpair()
    with one, other, pytest.raises(OSError, match="relay ca init"):
        context.wrap_socket(one, server_hostname="localhost")


# --- where another relay has the CA's key


class Elsewhere:
    """The relay with the CA's key: what it issues, by the CA of this test; away while ``away`` is set."""

    def __init__(self, ca: CertificateAuthority) -> None:
        self.ca = ca
        self.away = False
        self.asked: list[str] = []

    async def certify(self, use: str, public_key: str) -> str:
        self.asked.append(use)
        if self.away:
            raise AuthorityUnavailableError("no relay with the CA's key is connected")
        return await asyncio.to_thread(issue_for_another_relay, self.ca, use, public_key, LOCAL_URL)


async def test_a_relay_without_the_ca_s_key_has_its_certificates_renewed_by_the_one_with_it(
    ca: CertificateAuthority, clock: FakeClock, state: StateFiles
) -> None:
    log, config = LogLines(), serving(state, BrokerAddress("localhost", 8883, tls=True))
    made(config, ca, clock, log)  # as its first certificates come: with its state
    elsewhere = Elsewhere(ca)
    tls = made(config, ca, clock, log, certify=elsewhere.certify)
    assert await tls.refresh()
    assert elsewhere.asked == []
    before = state.own_tls.certificate.read_bytes()
    clock.advance(61 * DAY_MS)
    elsewhere.away = True
    assert not await tls.refresh()
    assert state.own_tls.certificate.read_bytes() == before
    elsewhere.away = False
    assert await tls.refresh()
    # Each is asked for, whatever came of the one before.
    assert elsewhere.asked == ["serve", "broker"] * 2
    assert state.own_tls.certificate.read_bytes() != before
    assert state.broker_client_tls.certificate.exists()


async def test_a_certificate_that_was_not_asked_for_is_not_used(
    ca: CertificateAuthority, clock: FakeClock, state: StateFiles
) -> None:
    log, config = LogLines(), serving(state)
    made(config, ca, clock, log)
    before = state.own_tls.certificate.read_text()

    async def certify(_use: str, _public_key: str) -> str:
        return before

    tls = made(config, ca, clock, log, certify=certify)
    clock.advance(61 * DAY_MS)
    assert not await tls.refresh()
    assert "another certificate: age" in log.entries("certificate not renewed")[-1]["reason"]


def test_without_a_first_certificate_the_error_says_where_it_comes_from(
    ca: CertificateAuthority, clock: FakeClock, state: StateFiles
) -> None:
    with pytest.raises(AuthorityStateError, match="--without-ca-key"):
        made(serving(state), ca, clock, LogLines(), certify=Elsewhere(ca).certify)


def test_each_certificate_that_the_relay_shows_has_an_end(hub: Hub, tmp_path: Path) -> None:
    plain = config(tmp_path)
    assert Expiries(plain, lambda: hub.ca.root_pem).names == ("root",)
    over_tls = replace(
        plain,
        tls=TlsFiles(tmp_path / "server.pem", tmp_path / "server.key"),
        broker=BrokerAddress("broker.example", 8883, tls=True),
    )
    expiries = Expiries(over_tls, lambda: hub.ca.root_pem)
    assert expiries.names == ("root", "server", "broker_client")
    leaf_pem = hub.ca.issue().leaf_pem
    (tmp_path / "server.pem").write_text(leaf_pem)
    assert expiries.end_ms("server") == validity_of(first_certificate_in(leaf_pem))[1]
    assert expiries.end_ms("root") == validity_of(first_certificate_in(hub.ca.root_pem))[1]


@pytest.mark.parametrize("damaged", [None, b"", b"\xff", b"no certificate"])
def test_one_that_cannot_be_read_ends_at_once(tmp_path: Path, damaged: bytes | None) -> None:
    def unreadable() -> str:
        raise AuthorityStateError("the root is damaged")

    served = TlsFiles(tmp_path / "server.pem", tmp_path / "server.key")
    if damaged is not None:
        served.certificate.write_bytes(damaged)
    over_tls = replace(config(tmp_path), tls=served)
    expiries = Expiries(over_tls, unreadable)
    assert (expiries.end_ms("server"), expiries.end_ms("root")) == (0, 0)
