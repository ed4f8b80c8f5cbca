import os

import pytest
from cryptography import x509
from nacl.signing import SigningKey

from relay.pki.errors import AuthorityError, AuthorityOptionError, AuthorityStateError
from relay.pki.issuing import Issuing, Signer, read_request
from schemas.certificates import make_csr, verify_leaf
from tests.fakes.clock import FakeClock
from tests.fakes.server_ca import server_key_named
from tests.fakes.signer import DAY_MS, NODE_ID, NOW_MS, key_named

KEY = key_named("the node")
PUBLIC_KEY = bytes(KEY.verify_key)


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock(NOW_MS)


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
    assert record.serial == x509.load_pem_x509_certificate(pem.encode()).serial_number
    assert (record.issued_ms, record.join_id) == (NOW_MS, "the join token")


def test_the_record_of_a_server_is_what_stands_in_its_certificate(issuing: Issuing) -> None:
    root, key = issuing.server_root(server_key_named("root")), server_key_named("broker").public_key()
    record, pem = issuing.server(root, "mqtt.example", ["mqtt.example"], key, 397)
    certificate = x509.load_pem_x509_certificate(pem.encode())
    assert record.serial == certificate.serial_number
    assert record.not_after_ms == certificate.not_valid_after_utc.timestamp() * 1000
    assert record.not_after_ms == NOW_MS + 397 * DAY_MS


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


def test_what_a_request_asks_for_is_read() -> None:
    assert read_request(make_csr(KEY, NODE_ID)) == (NODE_ID, PUBLIC_KEY)
    with pytest.raises(AuthorityError, match="not accepted: not_a_request"):
        read_request("")


def test_nothing_else_gets_the_name_of_a_node(issuing: Issuing, root: Signer[SigningKey]) -> None:
    servers, key = issuing.server_root(server_key_named("root")), server_key_named("broker").public_key()
    with pytest.raises(AuthorityOptionError, match="nothing else can have it"):
        issuing.server(servers, NODE_ID, ["mqtt.example"], key, 397)
    with pytest.raises(AuthorityOptionError, match="nothing else can have it"):
        issuing.client(root, NODE_ID, "urn:x", PUBLIC_KEY, 90)


def test_the_record_of_a_client_is_what_stands_in_its_certificate(
    issuing: Issuing, root: Signer[SigningKey]
) -> None:
    record, pem = issuing.client(root, "edge-relay", "urn:x", PUBLIC_KEY, 90)
    certificate = x509.load_pem_x509_certificate(pem.encode())
    assert record.serial == certificate.serial_number
    assert record.not_after_ms == certificate.not_valid_after_utc.timestamp() * 1000 == NOW_MS + 90 * DAY_MS


def test_what_the_operator_wants_it_for_is_named_without_control_characters(
    issuing: Issuing, root: Signer[SigningKey]
) -> None:
    with pytest.raises(AuthorityOptionError, match=r"not issued for tenant .*not_a_tenant") as caught:
        issuing.leaf(root, NODE_ID, "\x1b[31m", PUBLIC_KEY)
    assert str(caught.value).isprintable()
    servers, key = issuing.server_root(server_key_named("root")), server_key_named("broker").public_key()
    with pytest.raises(AuthorityOptionError, match=r"not issued for server .*not_a_host"):
        issuing.server(servers, "mqtt.example", [], key, 397)


def test_a_clock_that_was_never_set_makes_no_root() -> None:
    with pytest.raises(AuthorityStateError, match="set the clock"):
        Issuing(FakeClock(1_000), os.urandom).root()
