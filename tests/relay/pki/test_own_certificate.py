import os
import ssl
import stat
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePublicKey
from cryptography.x509.oid import ExtendedKeyUsageOID

from relay.pki.authority import CertificateAuthority
from relay.pki.own_certificate import (
    RELAY_NAME,
    RELAY_URI,
    BrokerCertificate,
    ServedCertificate,
    WantedCertificate,
    reason_to_renew,
)
from relay.settings.config import TlsFiles
from relay.state.key_files import KeyFileError
from schemas.addresses import host_of
from schemas.certificates import IdentityError, verify_leaf
from schemas.files import PRIVATE, ExposedFileError, make_private_directory, write_atomic
from schemas.keys import private_key_to_pem
from schemas.tls import load_chain
from tests.fakes.clock import FakeClock
from tests.fakes.server_ca import SimulatedServerCa, issue_old_server, server_key_named
from tests.fakes.signer import DAY_MS, NOW_MS, SimulatedCa, key_named

URL = "https://relay.example:8443"
CA = SimulatedServerCa()
HOSTS = ("relay.example", "127.0.0.1", "::1")
KEY = server_key_named("relay").public_key()
WANTED = WantedCertificate(RELAY_NAME, frozenset(HOSTS), KEY)
DAYS = 90
DAY = timedelta(days=1)


def issued(ca: SimulatedServerCa = CA, *hosts: str) -> str:
    return ca.issue(RELAY_NAME, hosts or HOSTS, KEY, DAYS)


# --- when a certificate will not do any longer --------------------------------------------------------


def test_a_young_certificate_for_what_is_wanted_stays() -> None:
    assert reason_to_renew(issued(), WANTED, [CA.root_pem], NOW_MS) is None


def test_it_is_renewed_from_two_thirds_of_its_life() -> None:
    two_thirds = NOW_MS + DAYS * DAY_MS * 2 // 3
    hour = 3_600_000
    assert reason_to_renew(issued(), WANTED, [CA.root_pem], two_thirds - hour) is None
    assert reason_to_renew(issued(), WANTED, [CA.root_pem], two_thirds + hour) == "age"


def test_one_with_a_key_of_an_unknown_kind_is_replaced() -> None:
    der = ssl.PEM_cert_to_DER_cert(issued())
    ec_public_key = bytes.fromhex("2a8648ce3d0201")
    assert ec_public_key in der
    damaged = ssl.DER_cert_to_PEM_cert(der.replace(ec_public_key, bytes.fromhex("2a8648ce3d0209")))
    assert reason_to_renew(damaged, WANTED, [CA.root_pem], NOW_MS) == "none"


def test_one_that_is_not_good_yet_is_replaced() -> None:
    assert reason_to_renew(issued(), WANTED, [CA.root_pem], NOW_MS - DAY_MS) == "age"


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
def clock() -> FakeClock:
    return FakeClock(NOW_MS)


@pytest.fixture
def ca(tmp_path: Path, clock: FakeClock) -> CertificateAuthority:
    ca = CertificateAuthority(tmp_path / "ca", clock, os.urandom)
    ca.create()
    return ca


@pytest.fixture
def files(tmp_path: Path) -> TlsFiles:
    return TlsFiles(tmp_path / "tls" / "server.pem", tmp_path / "tls" / "server.key")


def held(files: TlsFiles) -> x509.Certificate:
    load_chain(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), files.certificate, files.key)
    return x509.load_pem_x509_certificate(files.certificate.read_bytes())


def own(ca: CertificateAuthority, files: TlsFiles, clock: FakeClock, url: str = URL) -> ServedCertificate:
    return ServedCertificate(files, ca.servers, RELAY_NAME, [host_of(url)], clock, os.urandom)


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


def test_it_is_renewed_in_time(ca: CertificateAuthority, files: TlsFiles, clock: FakeClock) -> None:
    certificate = own(ca, files, clock)
    certificate.renew()
    ends = held(files).not_valid_after_utc
    clock.now_ms += int((ends - datetime.fromtimestamp(NOW_MS / 1000, UTC)).total_seconds() * 800)
    assert certificate.renew()
    assert held(files).not_valid_after_utc > ends
    assert not certificate.renew()


def test_a_key_that_others_can_read_is_refused(
    ca: CertificateAuthority, files: TlsFiles, clock: FakeClock
) -> None:
    own(ca, files, clock).renew()
    files.key.chmod(0o640)
    with pytest.raises(ExposedFileError, match="chmod 600"):
        own(ca, files, clock).renew()


def test_a_damaged_key_is_said_and_not_replaced(
    ca: CertificateAuthority, files: TlsFiles, clock: FakeClock
) -> None:
    own(ca, files, clock).renew()
    files.key.write_text("what was a secret")
    with pytest.raises(KeyFileError, match=r"server\.key is damaged") as failed:
        own(ca, files, clock).renew()
    assert "what was" not in str(failed.value)
    assert files.key.read_text() == "what was a secret"


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
    certificate = BrokerCertificate(files, ca, clock, os.urandom)
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
    assert BrokerCertificate(files, ca, clock, os.urandom).renew()
    held(files).verify_directly_issued_by(x509.load_pem_x509_certificate(ca.root_pem().encode()))
    assert files.key.read_text() == private_key_to_pem(key)
