"""What is issued, byte by byte, and the records of it."""

import os
import ssl
import time
from collections.abc import Sequence
from dataclasses import dataclass
from ipaddress import ip_address
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey, EllipticCurvePublicKey
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.x509.oid import ExtendedKeyUsageOID
from nacl.signing import SigningKey

from relay.pki.errors import AuthorityError, AuthorityOptionError
from relay.pki.issuing import (
    Issuing,
    Signer,
    cross_certify,
    issue_client,
    issue_leaf,
    issue_server,
    make_crl,
    make_root,
    make_server_root,
)
from relay.pki.roots import server_key_to_pem
from schemas.certificates import UNENROLLED_TENANT, IdentityError, client_builder, pem_of, verify_leaf
from schemas.files import PRIVATE, write_atomic
from schemas.identity import san_uri
from schemas.keys import private_key_to_pem
from tests.fakes.clock import FakeClock
from tests.fakes.server_ca import SimulatedServerCa, server_key_named
from tests.fakes.signer import DAY_MS, LOW_ORDER_KEYS, NODE_ID, NOW_MS, OTHER_NODE_ID, SimulatedCa, key_named

KEY = key_named("the node")
PUBLIC_KEY = bytes(KEY.verify_key)


@pytest.fixture
def issuing(clock: FakeClock) -> Issuing:
    return Issuing(clock, os.urandom)


@pytest.fixture
def root(issuing: Issuing) -> Signer[SigningKey]:
    return issuing.root()


def test_the_record_of_a_leaf_is_what_stands_in_it(issuing: Issuing, root: Signer[SigningKey]) -> None:
    record, pem = issuing.leaf(root, NODE_ID, "acme", PUBLIC_KEY, "the join token")
    leaf = verify_leaf(pem, [root.pem], NOW_MS)
    assert (record.node_id, record.tenant, record.public_key) == (leaf.node_id, leaf.tenant, leaf.public_key)
    assert (record.kid, record.not_after_ms) == (leaf.kid, leaf.not_after_ms)
    assert record.serial == serial_of(pem)
    assert (record.issued_ms, record.join_id) == (NOW_MS, "the join token")


def test_the_record_of_a_server_or_a_client_is_what_stands_in_its_certificate(
    issuing: Issuing, root: Signer[SigningKey]
) -> None:
    servers, key = issuing.server_root(server_key_named("root")), server_key_named("broker").public_key()
    for (record, pem), days in (
        (issuing.server(servers, "mqtt.example", ["mqtt.example"], key, 397), 397),
        (issuing.client(root, "edge-relay", "urn:x", PUBLIC_KEY, 90), 90),
    ):
        certificate = read(pem)
        assert record.serial == certificate.serial_number
        assert record.not_after_ms == certificate.not_valid_after_utc.timestamp() * 1000
        assert record.not_after_ms == NOW_MS + days * DAY_MS


def test_near_the_end_of_a_root_the_record_says_when_the_leaf_really_ends(
    issuing: Issuing, root: Signer[SigningKey], clock: FakeClock
) -> None:
    clock.advance(3600 * DAY_MS)
    record, pem = issuing.leaf(root, NODE_ID, "acme", PUBLIC_KEY)
    assert record.not_after_ms == verify_leaf(pem, [root.pem], clock()).not_after_ms
    assert record.not_after_ms == NOW_MS + 3650 * DAY_MS


def test_at_the_end_of_a_root_the_error_says_what_to_do(
    issuing: Issuing, root: Signer[SigningKey], clock: FakeClock
) -> None:
    clock.advance(3650 * DAY_MS)
    with pytest.raises(AuthorityError, match="relay ca rotate-root"):
        issuing.leaf(root, NODE_ID, "acme", PUBLIC_KEY)


def test_a_root_that_is_no_certificate_is_an_error_that_shows_nothing_of_it(issuing: Issuing) -> None:
    damaged = "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"
    with pytest.raises(AuthorityError, match=r"^the root [0-9a-f]{64} is damaged$"):
        issuing.leaf(Signer(damaged, KEY), NODE_ID, "acme", PUBLIC_KEY)


def test_serial_numbers_are_positive_and_differ(issuing: Issuing, root: Signer[SigningKey]) -> None:
    serials = {issuing.leaf(root, NODE_ID, "acme", PUBLIC_KEY)[0].serial for _ in range(50)}
    assert len(serials) == 50
    assert all(0 < serial < 2**128 for serial in serials)
    zero = Issuing(FakeClock(NOW_MS), bytes)
    assert zero.leaf(root, NODE_ID, "acme", PUBLIC_KEY)[0].serial == 1


def test_a_signer_does_not_show_its_key(root: Signer[SigningKey]) -> None:
    assert str(root.key) not in repr(root)
    assert "SigningKey" not in repr(root)


def test_nothing_else_gets_the_name_of_a_node(issuing: Issuing, root: Signer[SigningKey]) -> None:
    servers, key = issuing.server_root(server_key_named("root")), server_key_named("broker").public_key()
    with pytest.raises(AuthorityOptionError, match="nothing else can have it"):
        issuing.server(servers, NODE_ID, ["mqtt.example"], key, 397)
    with pytest.raises(AuthorityOptionError, match="nothing else can have it"):
        issuing.client(root, NODE_ID, "urn:x", PUBLIC_KEY, 90)


def test_what_the_operator_wants_it_for_is_named_without_control_characters(
    issuing: Issuing, root: Signer[SigningKey]
) -> None:
    with pytest.raises(AuthorityOptionError, match=r"not issued for tenant .*not_a_tenant") as caught:
        issuing.leaf(root, NODE_ID, "\x1b[31m", PUBLIC_KEY)
    assert str(caught.value).isprintable()
    servers, key = issuing.server_root(server_key_named("root")), server_key_named("broker").public_key()
    for name, hosts in (("mqtt.example", []), ("\x1b[31m", ["mqtt.example"])):
        with pytest.raises(AuthorityOptionError, match=r"not issued for server .*not_a_host") as caught:
            issuing.server(servers, name, hosts, key, 397)
        assert str(caught.value).isprintable()


# What follows is judged by OpenSSL, which has the machine's clock and no other.
REAL_MS = time.time_ns() // 1_000_000
SERIALS = count(1000)
SERVER_KEY = server_key_named("a server")
CLIENT_KEY = key_named("the relay")
RELAY_URI = "urn:edge-kubelet:relay"

Key = SigningKey | EllipticCurvePrivateKey


class Root:
    def __init__(self, name: str) -> None:
        self._nodes = SimulatedCa(f"root {name}", REAL_MS)
        self._servers = SimulatedServerCa(f"servers {name}", REAL_MS)
        self.key, self.pem = self._nodes.key, self._nodes.root_pem
        self.servers_key, self.servers = self._servers.key, self._servers.root_pem

    def leaf(self, node_id: str = NODE_ID) -> str:
        return self._nodes.issue(node_id, "acme", key=key_named(node_id), now_ms=REAL_MS).leaf_pem

    def server(self, *hosts: str, name: str = "server", now_ms: int = REAL_MS) -> str:
        return self._servers.issue(name, hosts, SERVER_KEY.public_key(), 397, now_ms)

    def client(self, name: str = "edge-relay", public_key: bytes = bytes(CLIENT_KEY.verify_key)) -> str:
        return issue_client(
            self.pem,
            self.key,
            name=name,
            uri=RELAY_URI,
            public_key=public_key,
            now_ms=REAL_MS,
            valid_days=90,
            serial=next(SERIALS),
        )

    def crl(self, *revoked: str) -> str:
        return make_crl(self.pem, self.key, [serial_of(pem) for pem in revoked], REAL_MS, 1)


ROOT, OTHER_ROOT = Root("one"), Root("two")


def read(pem: str) -> x509.Certificate:
    return x509.load_pem_x509_certificate(pem.encode())


def serial_of(pem: str) -> int:
    return read(pem).serial_number


def usages(pem: str) -> list[x509.ObjectIdentifier]:
    return list(read(pem).extensions.get_extension_for_class(x509.ExtendedKeyUsage).value)


def key_identifiers(issued: x509.Certificate | x509.CertificateRevocationList) -> bytes | None:
    return issued.extensions.get_extension_for_class(x509.AuthorityKeyIdentifier).value.key_identifier


# --- what stands in them ------------------------------------------------------------------------------


def test_all_that_a_root_issues_names_the_key_that_signed_it() -> None:
    own = read(ROOT.pem).extensions.get_extension_for_class(x509.SubjectKeyIdentifier).value.digest
    crl = x509.load_pem_x509_crl(ROOT.crl().encode())
    issued = [key_identifiers(read(pem)) for pem in (ROOT.leaf(), ROOT.client())]
    assert [*issued, key_identifiers(crl)] == [own] * 3
    servers = read(ROOT.servers).extensions.get_extension_for_class(x509.SubjectKeyIdentifier).value.digest
    assert key_identifiers(read(ROOT.server("a"))) == servers != own
    assert key_identifiers(read(OTHER_ROOT.leaf())) != own


def test_a_node_and_the_broker_s_other_clients_may_only_be_clients_and_a_server_only_a_server() -> None:
    assert usages(ROOT.leaf()) == usages(ROOT.client()) == [ExtendedKeyUsageOID.CLIENT_AUTH]
    assert usages(ROOT.server("a")) == usages(ROOT.servers) == [ExtendedKeyUsageOID.SERVER_AUTH]


def test_servers_and_their_root_have_keys_that_every_tls_client_takes() -> None:
    for pem in (ROOT.servers, ROOT.server("a")):
        key = read(pem).public_key()
        assert isinstance(key, EllipticCurvePublicKey)
        assert key.curve.name == "secp256r1"
        assert isinstance(read(pem).signature_hash_algorithm, SHA256)


def test_a_server_is_named_by_its_name_and_reached_under_its_hosts() -> None:
    hosts = ["relay.example", "192.0.2.7", "::1", "[2001:db8::1]"]
    certificate = read(ROOT.server(*hosts, name="edge-relay"))
    assert certificate.subject.rfc4514_string() == "CN=edge-relay"
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["relay.example"]
    addresses = [ip_address(text) for text in ("192.0.2.7", "::1", "2001:db8::1")]
    assert names.get_values_for_type(x509.IPAddress) == addresses
    assert not certificate.extensions.get_extension_for_class(x509.BasicConstraints).value.ca


def test_a_servers_certificate_never_outlives_its_root() -> None:
    late = REAL_MS + 3640 * DAY_MS
    life = read(ROOT.server("a", now_ms=late)).not_valid_after_utc
    assert life <= read(ROOT.pem).not_valid_after_utc
    with pytest.raises(IdentityError, match="root_too_old"):
        ROOT.server("a", now_ms=REAL_MS + 3650 * DAY_MS)


@pytest.mark.parametrize(
    "host",
    [
        "",
        " ",
        "*.example",
        "a b",
        "a.",
        "https://relay.example",
        "relay.example:443",
        "]::1[",
        "[::1",
        "fe80::1%eth0",
        "[relay.example]",
        "caf\u00e9.example",
        "a\n",
        "a\x00b",
        "a" * 254,
    ],
)
def test_what_is_no_host_is_in_no_certificate(host: str) -> None:
    with pytest.raises(IdentityError, match="not_a_host"):
        ROOT.server("relay.example", host)
    with pytest.raises(IdentityError, match="not_a_host"):
        ROOT.server("relay.example", name=host)


def test_a_name_may_be_as_long_as_the_standard_allows() -> None:
    label = "a" * 62
    assert read(ROOT.server("a", name=f"{label}.b")).subject.rfc4514_string() == f"CN={label}.b"
    with pytest.raises(IdentityError, match="not_a_name"):
        ROOT.server("a", name=f"{label}.bb")


@pytest.mark.parametrize("low", LOW_ORDER_KEYS.values(), ids=LOW_ORDER_KEYS)
def test_no_client_gets_a_certificate_for_a_key_of_low_order(low: bytes) -> None:
    with pytest.raises(IdentityError, match="low_order_key"):
        ROOT.client(public_key=low)


@pytest.mark.parametrize("name", [NODE_ID, "server"])
def test_a_client_s_certificate_identifies_no_node(name: str) -> None:
    with pytest.raises(IdentityError, match="wrong_form"):
        verify_leaf(ROOT.client(name), [ROOT.pem], REAL_MS)


def forged_leaf() -> str:
    """Return a perfect leaf of a node, but for the root of servers that has signed it."""
    san = san_uri("acme", NODE_ID)
    builder = client_builder(bytes(key_named(NODE_ID).verify_key), NODE_ID, san, REAL_MS, 90)
    issuer = read(ROOT.servers)
    builder = builder.issuer_name(issuer.subject).serial_number(next(SERIALS))
    aki = x509.AuthorityKeyIdentifier.from_issuer_public_key(ROOT.servers_key.public_key())
    return pem_of(builder.add_extension(aki, critical=False).sign(ROOT.servers_key, SHA256()))


def test_a_root_of_servers_identifies_no_node_wherever_it_is_trusted() -> None:
    cross = cross_certify(ROOT.pem, ROOT.key, ROOT.servers, next(SERIALS))
    for roots in ([ROOT.pem], [ROOT.servers], [ROOT.pem, ROOT.servers], [cross], [ROOT.pem + cross]):
        with pytest.raises(IdentityError, match="chain"):
            verify_leaf(forged_leaf() + cross, roots, REAL_MS)
    assert verify_leaf(ROOT.leaf(), [ROOT.servers, ROOT.pem], REAL_MS).node_id == NODE_ID


def test_a_list_of_the_revoked_is_signed_and_good_for_as_long_as_its_root() -> None:
    leaf = ROOT.leaf()
    crl = x509.load_pem_x509_crl(make_crl(ROOT.pem, ROOT.key, [serial_of(leaf)], REAL_MS, 7).encode())
    root = read(ROOT.pem)
    public_key = root.public_key()
    assert isinstance(public_key, Ed25519PublicKey)
    assert crl.is_signature_valid(public_key)
    assert crl.issuer == root.subject
    assert crl.next_update_utc == root.not_valid_after_utc
    assert [entry.serial_number for entry in crl] == [serial_of(leaf)]
    assert crl.extensions.get_extension_for_class(x509.CRLNumber).value.crl_number == 7


# --- what others make of them -------------------------------------------------------------------------


@dataclass
class Shown:
    """What one end of a connection shows of itself, and whom it believes."""

    directory: Path

    def context(
        self, protocol: int, shown: tuple[str, Key], trusted: Sequence[str], crls: Sequence[str] = ()
    ) -> ssl.SSLContext:
        context = ssl.SSLContext(protocol)
        context.verify_mode = ssl.CERT_REQUIRED
        context.verify_flags |= ssl.VERIFY_X509_STRICT
        trust = self.directory / f"trust-{protocol}.pem"
        trust.write_text("".join([*trusted, *crls]))
        context.load_verify_locations(trust)
        if crls:
            context.verify_flags |= ssl.VERIFY_CRL_CHECK_LEAF
        certificate, key = self.directory / f"{protocol}.pem", self.directory / f"{protocol}.key"
        write_atomic(certificate, shown[0])
        secret = shown[1]
        pem = private_key_to_pem(secret) if isinstance(secret, SigningKey) else server_key_to_pem(secret)
        write_atomic(key, pem, PRIVATE)
        context.load_cert_chain(certificate, key)
        return context


def connect(client: ssl.SSLContext, server: ssl.SSLContext, host: str) -> tuple[str, str]:
    """Return why the client refused the server and why the server refused the client, or nothing."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = (
        client.wrap_bio(to_client, to_server, server_hostname=host),
        server.wrap_bio(to_server, to_client, server_side=True),
    )
    refusals = ["", ""]
    for _ in range(8):
        for place, end in enumerate(ends):
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                pass
            except ssl.SSLCertVerificationError as error:
                refusals[place] = error.verify_message
                return refusals[0], refusals[1]
    assert ends[0].version() == ends[1].version() == "TLSv1.3"
    return refusals[0], refusals[1]


def between(  # noqa: PLR0913 - what a test may want to have otherwise
    directory: Path,
    *,
    host: str = "relay.example",
    client: tuple[str, Key] | None = None,
    server: tuple[str, Key] | None = None,
    client_trusts: Sequence[str] = (ROOT.servers,),
    server_trusts: Sequence[str] = (ROOT.pem,),
    crls: Sequence[str] = (),
) -> tuple[str, str]:
    """Connect a node to a server, both strict, and return who refused whom and why."""
    shown = Shown(directory)
    node = client or (ROOT.leaf(), key_named(NODE_ID))
    other = server or (ROOT.server("relay.example", "127.0.0.1", "::1"), SERVER_KEY)
    return connect(
        shown.context(ssl.PROTOCOL_TLS_CLIENT, node, client_trusts),
        shown.context(ssl.PROTOCOL_TLS_SERVER, other, server_trusts, crls),
        host,
    )


@pytest.mark.parametrize("host", ["relay.example", "RELAY.example", "127.0.0.1", "::1"])
def test_a_strict_client_and_a_strict_server_believe_each_other(tmp_path: Path, host: str) -> None:
    assert between(tmp_path, host=host, crls=[ROOT.crl()]) == ("", "")


def test_the_relay_is_believed_as_a_client(tmp_path: Path) -> None:
    assert between(tmp_path, client=(ROOT.client(), CLIENT_KEY), crls=[ROOT.crl()]) == ("", "")


def old_root_of_servers() -> tuple[str, str]:
    """Return the root of servers of a CA that had none, and its certificate by the root of nodes."""
    servers = make_server_root(ROOT.servers_key, "root one", REAL_MS, 3650, next(SERIALS))
    return servers, cross_certify(ROOT.pem, ROOT.key, servers, next(SERIALS))


def test_who_knows_the_root_of_nodes_alone_believes_a_server_by_the_cross_certificate(tmp_path: Path) -> None:
    servers, cross = old_root_of_servers()
    leaf = issue_server(
        servers,
        ROOT.servers_key,
        name="server",
        hosts=["relay.example"],
        public_key=SERVER_KEY.public_key(),
        now_ms=REAL_MS,
        valid_days=90,
        serial=next(SERIALS),
    )
    for trusted in ([ROOT.pem], [servers], [servers, ROOT.pem]):
        assert between(tmp_path, server=(leaf + cross, SERVER_KEY), client_trusts=trusted) == ("", "")
    refused, _ = between(tmp_path, server=(leaf, SERVER_KEY), client_trusts=[ROOT.pem])
    assert refused


def test_the_cross_certificate_makes_no_client_of_what_the_root_of_servers_signs(tmp_path: Path) -> None:
    _, cross = old_root_of_servers()
    client = forged_leaf() + cross, key_named(NODE_ID)
    assert between(tmp_path, client=client)[1]
    differing = cross_certify(ROOT.pem, ROOT.key, ROOT.servers, next(SERIALS))
    assert between(tmp_path, client=(forged_leaf() + differing, key_named(NODE_ID)))[1]


def test_a_server_cannot_play_a_client(tmp_path: Path) -> None:
    client = ROOT.server(NODE_ID, name="edge-relay"), SERVER_KEY
    trusted = [ROOT.pem, ROOT.servers]
    assert "unsuitable certificate purpose" in between(tmp_path, client=client, server_trusts=trusted)[1]


def test_a_server_is_not_believed_under_another_name(tmp_path: Path) -> None:
    for host in ("server", "other.example", "127.0.0.2"):
        assert "mismatch" in between(tmp_path, host=host)[0]


def test_a_server_of_another_root_is_not_believed(tmp_path: Path) -> None:
    server = OTHER_ROOT.server("relay.example"), SERVER_KEY
    assert "unable to get local issuer" in between(tmp_path, server=server)[0]


def test_a_node_cannot_play_a_server(tmp_path: Path) -> None:
    trusted = [ROOT.servers, ROOT.pem]
    server = ROOT.leaf(), key_named(NODE_ID)
    assert between(tmp_path, server=server)[0]
    refused, _ = between(tmp_path, server=server, client_trusts=trusted)
    assert "unsuitable certificate purpose" in refused


def test_a_node_of_another_root_is_not_believed(tmp_path: Path) -> None:
    node = OTHER_ROOT.leaf(), key_named(NODE_ID)
    assert "unable to get local issuer" in between(tmp_path, client=node)[1]


def test_during_a_rotation_both_roots_are_believed(tmp_path: Path) -> None:
    both = [OTHER_ROOT.pem, ROOT.pem]
    node = OTHER_ROOT.leaf(), key_named(NODE_ID)
    crls = [OTHER_ROOT.crl(), ROOT.crl()]
    assert between(tmp_path, client=node, server_trusts=both, crls=crls) == ("", "")


@pytest.mark.parametrize("issuer", [ROOT, OTHER_ROOT], ids=["the old root", "the new root"])
def test_a_revoked_leaf_of_either_root_is_refused_and_no_other(tmp_path: Path, issuer: Root) -> None:
    both = [OTHER_ROOT.pem, ROOT.pem]
    revoked, good = issuer.leaf(), issuer.leaf(OTHER_NODE_ID)
    # Each list names all serials, also those of the other root.
    crls = [OTHER_ROOT.crl(revoked), ROOT.crl(revoked)]
    refusal = between(tmp_path, client=(revoked, key_named(NODE_ID)), server_trusts=both, crls=crls)
    assert refusal == ("", "certificate revoked")
    for node_id, pem in ((OTHER_NODE_ID, good), (NODE_ID, issuer.leaf())):
        accepted = between(tmp_path, client=(pem, key_named(node_id)), server_trusts=both, crls=crls)
        assert accepted == ("", "")


def test_where_a_revocation_list_is_required_a_root_without_one_admits_no_client(tmp_path: Path) -> None:
    both = [OTHER_ROOT.pem, ROOT.pem]
    assert between(tmp_path, server_trusts=both, crls=[OTHER_ROOT.crl()]) == (
        "",
        "unable to get certificate CRL",
    )


def test_a_list_that_another_root_made_in_its_name_is_not_believed(tmp_path: Path) -> None:
    forged = make_crl(
        make_root(OTHER_ROOT.key, "root one", REAL_MS, 3650, 1), OTHER_ROOT.key, [], REAL_MS, 99
    )
    assert between(tmp_path, crls=[forged])[1] != ""


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        pytest.param({"public_key": next(iter(LOW_ORDER_KEYS.values()))}, "low_order_key", id="low order"),
        pytest.param({"node_id": "mqtt.example"}, "not_a_node_id", id="no node id"),
        pytest.param({"tenant": "Acme"}, "not_a_tenant", id="no tenant"),
        pytest.param({"tenant": UNENROLLED_TENANT}, "not_a_tenant", id="the tenant of those not enrolled"),
    ],
)
def test_a_leaf_of_another_form_is_not_issued(changes: dict[str, Any], reason: str) -> None:
    good = {"node_id": NODE_ID, "tenant": "acme", "public_key": bytes(key_named(NODE_ID).verify_key)}
    with pytest.raises(IdentityError) as caught:
        issue_leaf(ROOT.pem, ROOT.key, **{**good, **changes}, now_ms=REAL_MS, valid_days=90, serial=1)
    assert caught.value.reason == reason
