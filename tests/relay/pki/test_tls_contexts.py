import asyncio
import contextlib
import os
import socket
import ssl
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from cryptography import x509

from relay.pki.authority import CertificateAuthority
from relay.pki.broker_access import BrokerAccess
from relay.pki.errors import AuthorityStateError
from relay.pki.own_certificate import RELAY_NAME, OwnAuthority, issue_for_another_relay
from relay.pki.tls_contexts import INTERVAL_S, LiveContext, RelayTls, broker_context
from relay.routing.authority_port import AuthorityUnavailableError
from relay.settings.config import RelayConfig, StateFiles, TlsFiles
from schemas.addresses import BrokerAddress, HostPort
from schemas.files import ExposedFileError
from schemas.keys import private_key_to_pem
from schemas.process.logs import make_logger
from schemas.tls import TlsFilesError, client_context
from tests.fakes.clock import FakeClock
from tests.fakes.lines import LogLines
from tests.fakes.signer import DAY_MS, SimulatedCa, key_named
from tests.fakes.tls_broker import Peer, PlayedAuthority, TlsBroker

BOUND_S = 10
NOW_MS = time.time_ns() // 1_000_000
LOCAL = HostPort("127.0.0.1", 8700)
URL = "https://localhost:8700"
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
    return PlayedAuthority(tmp_path, NOW_MS)


@pytest.fixture
def files(authority: PlayedAuthority) -> TlsFiles:
    shown = authority.server("relay")
    return TlsFiles(shown.certificate, shown.key)


# --- the context that is served with ------------------------------------------------------------------


@pytest.mark.integration
async def test_another_certificate_is_shown_from_then_on_and_no_connection_is_closed(
    authority: PlayedAuthority, files: TlsFiles
) -> None:
    live = LiveContext(files)
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
    authority: PlayedAuthority, files: TlsFiles, broken: str
) -> None:
    live = LiveContext(files)
    match broken:
        case "certificate":
            files.certificate.write_text("half a certif")
        case "another":
            files.certificate.write_text(authority.server("another").certificate.read_text())
        case "key":
            files.key.write_text(private_key_to_pem(key_named("of another certificate")))
        case "gone":
            files.certificate.unlink()
        case _:
            files.key.chmod(0o644)
            os.utime(files.key, ns=(0, 0))
    with pytest.raises(OSError, match=r"relay\.(pem|key)|certificate"):
        live.refresh()
    async with Echo.running(live.context) as echo:
        line = await echo.connect(authority.servers.root_pem)
        assert await line.is_alive()
        line.close()


@pytest.mark.parametrize("content", [b"\x30\x2e\xff\xfe", b"", b"no key"])
def test_a_key_that_is_none_is_refused(files: TlsFiles, content: bytes) -> None:
    files.key.write_bytes(content)
    with pytest.raises(TlsFilesError, match=r"relay\.key"):
        LiveContext(files)


def test_a_key_that_others_can_read_is_refused(files: TlsFiles) -> None:
    files.key.chmod(0o640)
    with pytest.raises(ExposedFileError, match="chmod 600"):
        LiveContext(files)


# --- a relay's -----------------------------------------------------------------------------------------


async def test_a_relay_without_tls_has_neither_contexts_nor_a_certificate(
    authority: PlayedAuthority, tmp_path: Path
) -> None:
    state = StateFiles(tmp_path / "state")
    config = RelayConfig(PLAIN_BROKER, "http://127.0.0.1:8700", LOCAL, state)
    tls = made(config, authority, FakeClock(NOW_MS), LogLines())
    assert (tls.served, tls.to_broker) == (None, None)
    assert not state.own_tls.certificate.exists()
    await tls.refresh()
    assert not state.own_tls.certificate.exists()


def made(config: RelayConfig, ca: OwnAuthority, clock: FakeClock, log: LogLines) -> RelayTls:
    return RelayTls(config, ca, now_ms=clock, random_bytes=os.urandom, log=make_logger("relay", log))


@pytest.fixture
def state(tmp_path: Path) -> StateFiles:
    return StateFiles(tmp_path / "state")


@pytest.mark.integration
async def test_a_relay_with_a_certificate_of_its_own_is_believed_by_its_root(
    authority: PlayedAuthority, state: StateFiles
) -> None:
    config = RelayConfig(PLAIN_BROKER, URL, LOCAL, state, tls=state.own_tls, own_root=True)
    tls = made(config, authority, FakeClock(NOW_MS), LogLines())
    assert tls.served is not None
    async with Echo.running(tls.served) as echo:
        line = await echo.connect(authority.servers.root_pem)
        assert await line.is_alive()
        with pytest.raises(ssl.SSLCertVerificationError):
            await echo.connect(SimulatedCa("another", NOW_MS).root_pem)
        line.close()


@pytest.mark.integration
async def test_its_certificate_is_renewed_in_time_and_when_its_root_is_gone(
    authority: PlayedAuthority, state: StateFiles
) -> None:
    config = RelayConfig(PLAIN_BROKER, URL, LOCAL, state, tls=state.own_tls, own_root=True)
    clock, log = FakeClock(NOW_MS), LogLines()
    tls = made(config, authority, clock, log)
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
    authority: PlayedAuthority, files: TlsFiles, state: StateFiles
) -> None:
    waits: list[float] = []
    log = LogLines()

    async def sleep(seconds: float) -> None:
        waits.append(seconds)
        match len(waits):
            case 1:
                files.certificate.write_text("half a certif")
            case 2:
                authority.server("relay")
            case 3:
                raise asyncio.CancelledError

    config = RelayConfig(PLAIN_BROKER, URL, LOCAL, state, tls=files)
    tls = RelayTls(
        config,
        authority,
        now_ms=FakeClock(NOW_MS),
        random_bytes=os.urandom,
        log=make_logger("relay", log),
        sleep=sleep,
    )
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
    tls = made(config, authority, FakeClock(NOW_MS), LogLines())
    assert tls.served is None
    assert tls.to_broker is not None
    shown = x509.load_pem_x509_certificate(state.broker_client_tls.certificate.read_bytes())
    assert shown.subject.rfc4514_string() == f"CN={RELAY_NAME}"
    elsewhere = tmp_path / "elsewhere.pem"
    elsewhere.write_text(SimulatedCa("another", NOW_MS).root_pem)
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
    tmp_path: Path, files: TlsFiles
) -> None:
    nothing = CertificateAuthority(tmp_path / "nothing", FakeClock(NOW_MS), os.urandom)
    context = broker_context(files, nothing.roots, None)
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
        return await asyncio.to_thread(issue_for_another_relay, self.ca, use, public_key, URL)


async def test_a_relay_without_the_ca_s_key_has_its_certificates_renewed_by_the_one_with_it(
    tmp_path: Path, state: StateFiles
) -> None:
    clock, log = FakeClock(NOW_MS), LogLines()
    ca = CertificateAuthority(tmp_path / "ca", clock, os.urandom)
    ca.create()
    broker = BrokerAddress("localhost", 8883, tls=True)
    config = RelayConfig(broker, URL, LOCAL, state, tls=state.own_tls, own_root=True)
    made(config, ca, clock, log)  # as its first certificates come: with its state
    elsewhere = Elsewhere(ca)
    tls = RelayTls(
        config,
        ca,
        certify=elsewhere.certify,
        now_ms=clock,
        random_bytes=os.urandom,
        log=make_logger("relay", log),
    )
    assert await tls.refresh()
    assert elsewhere.asked == []
    before = state.own_tls.certificate.read_bytes()
    clock.advance(61 * DAY_MS)
    elsewhere.away = True
    assert not await tls.refresh()
    assert state.own_tls.certificate.read_bytes() == before
    elsewhere.away = False
    assert await tls.refresh()
    assert elsewhere.asked == ["serve", "serve", "broker"]
    assert state.own_tls.certificate.read_bytes() != before
    assert state.broker_client_tls.certificate.exists()


async def test_a_certificate_that_was_not_asked_for_is_not_used(tmp_path: Path, state: StateFiles) -> None:
    clock, log = FakeClock(NOW_MS), LogLines()
    ca = CertificateAuthority(tmp_path / "ca", clock, os.urandom)
    ca.create()
    config = RelayConfig(PLAIN_BROKER, URL, LOCAL, state, tls=state.own_tls, own_root=True)
    made(config, ca, clock, log)
    before = state.own_tls.certificate.read_text()

    async def certify(_use: str, _public_key: str) -> str:
        return before

    tls = RelayTls(
        config, ca, certify=certify, now_ms=clock, random_bytes=os.urandom, log=make_logger("relay", log)
    )
    clock.advance(61 * DAY_MS)
    assert not await tls.refresh()
    assert "another certificate: age" in log.entries("certificate not renewed")[-1]["reason"]


def test_without_a_first_certificate_the_error_says_where_it_comes_from(
    tmp_path: Path, state: StateFiles
) -> None:
    ca = CertificateAuthority(tmp_path / "ca", FakeClock(NOW_MS), os.urandom)
    ca.create()
    config = RelayConfig(PLAIN_BROKER, URL, LOCAL, state, tls=state.own_tls, own_root=True)
    with pytest.raises(AuthorityStateError, match="--without-ca-key"):
        RelayTls(
            config,
            ca,
            certify=Elsewhere(ca).certify,
            now_ms=FakeClock(NOW_MS),
            random_bytes=os.urandom,
            log=make_logger("relay", LogLines()),
        )
