import base64
from contextlib import suppress
from dataclasses import FrozenInstanceError, replace
from datetime import UTC, datetime, timedelta
from hashlib import sha256

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from hypothesis import given
from hypothesis import strategies as st

from schemas.certificates import self_signed_leaf
from schemas.identity import (
    CertificateFormatError,
    certificates_in,
    first_certificate_in,
    is_for_key,
    kid_of,
    san_uri,
    validity_of,
)
from tests.fakes.examples import examples
from tests.fakes.signer import DAY_MS, NODE_ID, NOW_MS, SimulatedCa, key_named

CA = SimulatedCa()
NODE = CA.issue()


def pem(*ders: bytes) -> str:
    return "".join(
        f"-----BEGIN CERTIFICATE-----\n{base64.b64encode(der).decode()}\n-----END CERTIFICATE-----\n"
        for der in ders
    )


def test_certificates_come_in_the_order_of_the_file() -> None:
    leaf, root = certificates_in(NODE.leaf_pem + CA.root_pem)
    assert leaf == x509.load_pem_x509_certificate(NODE.leaf_pem.encode()).public_bytes(Encoding.DER)
    assert root == x509.load_pem_x509_certificate(CA.root_pem.encode()).public_bytes(Encoding.DER)


def test_text_around_certificates_is_ignored() -> None:
    assert certificates_in("# leaf\r\n" + pem(b"one") + "\nsubject=CN\n" + pem(b"two") + "end") == [
        b"one",
        b"two",
    ]


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("", id="nothing"),
        pytest.param("no certificate", id="prose"),
        pytest.param("-----BEGIN CERTIFICATE-----\nAAAA\n", id="no-end"),
        pytest.param("-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n", id="a-key"),
    ],
)
def test_a_text_without_certificates_has_none(text: str) -> None:
    assert certificates_in(text) == []


def test_a_certificate_that_is_not_base64_is_an_error() -> None:
    with pytest.raises(CertificateFormatError, match="a certificate is not base64"):
        certificates_in("-----BEGIN CERTIFICATE-----\nAAAAA\n-----END CERTIFICATE-----\n")


def test_a_text_over_the_limit_is_an_error() -> None:
    fitting = pem(b"one").ljust(16 * 1024)
    assert certificates_in(fitting) == [b"one"]
    with pytest.raises(CertificateFormatError, match="too large"):
        certificates_in(fitting + " ")


@pytest.mark.holds("RFC-0001/2/signature")
def test_the_kid_is_the_sha_256_thumbprint_of_the_leaf() -> None:
    leaf = x509.load_pem_x509_certificate(NODE.leaf_pem.encode())
    assert kid_of(first_certificate_in(NODE.leaf_pem)) == leaf.fingerprint(SHA256()).hex() == NODE.kid


def test_the_kid_of_known_bytes() -> None:
    assert kid_of(b"abc") == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    assert kid_of(b"") == sha256().hexdigest()


LEAF_DER = first_certificate_in(NODE.leaf_pem)
CA_KEY = bytes(CA.key.verify_key)


@pytest.mark.parametrize(
    ("pem_text", "key"),
    [
        pytest.param(NODE.leaf_pem, NODE.public_key, id="a-leaf-of-a-ca"),
        pytest.param(self_signed_leaf(NODE.key, NODE_ID, NOW_MS, 90, 5), NODE.public_key, id="self-signed"),
        pytest.param(CA.root_pem, CA_KEY, id="a-root"),
    ],
)
def test_a_certificate_is_for_the_key_that_it_holds(pem_text: str, key: bytes) -> None:
    [der] = certificates_in(pem_text)
    held = x509.load_der_x509_certificate(der).public_key().public_bytes(Encoding.Raw, PublicFormat.Raw)
    assert held == key
    assert is_for_key(der, key)


@pytest.mark.parametrize(
    ("der", "key"),
    [
        pytest.param(LEAF_DER, key_named("another").verify_key.encode(), id="another-key"),
        pytest.param(LEAF_DER, CA_KEY, id="the-key-that-signed-it"),
        pytest.param(LEAF_DER, bytes(NODE.key), id="the-private-key"),
        pytest.param(LEAF_DER, NODE.public_key[::-1], id="the-key-backwards"),
        pytest.param(
            LEAF_DER.replace(bytes.fromhex("2b6570032100"), b"\0" * 6), NODE.public_key, id="no-header"
        ),
        pytest.param(
            LEAF_DER.replace(bytes.fromhex("2b6570032100"), bytes.fromhex("2b656e032100")),
            NODE.public_key,
            id="a-key-of-another-algorithm",
        ),
        pytest.param(NODE.public_key, NODE.public_key, id="the-bare-key"),
        pytest.param(b"", NODE.public_key, id="nothing"),
    ],
)
def test_a_certificate_is_not_for_a_key_that_it_does_not_hold(der: bytes, key: bytes) -> None:
    assert not is_for_key(der, key)


def test_every_byte_of_the_key_counts() -> None:
    for index in range(32):
        flipped = bytearray(NODE.public_key)
        flipped[index] ^= 1
        assert not is_for_key(LEAF_DER, bytes(flipped)), index


@pytest.mark.holds("RFC-0001/2/kid-to-tenant")
def test_the_name_in_the_leaf_binds_tenant_and_node() -> None:
    assert san_uri("acme", NODE_ID) == f"urn:edge-kubelet:tenant:acme:node:{NODE_ID}"


@pytest.mark.parametrize(
    ("now_ms", "valid"),
    [
        pytest.param(NOW_MS - 1, False, id="a-millisecond-before-it-begins"),
        pytest.param(NOW_MS, True, id="as-it-begins"),
        pytest.param(NOW_MS + DAY_MS - 1, True, id="a-millisecond-before-it-ends"),
        pytest.param(NOW_MS + DAY_MS, False, id="as-it-ends"),
    ],
)
def test_an_identity_is_valid_from_its_beginning_until_before_its_end(now_ms: int, valid: bool) -> None:  # noqa: FBT001 - the expected answer
    identity = replace(NODE.identity(), not_before_ms=NOW_MS, not_after_ms=NOW_MS + DAY_MS)
    assert identity.valid_at(now_ms) is valid


def test_a_verified_identity_cannot_be_changed() -> None:
    with pytest.raises(FrozenInstanceError):
        NODE.identity().tenant = "other"  # type: ignore[misc]


# --- how long a certificate is good -------------------------------------------------------------------


def milliseconds(moment: datetime) -> int:
    return int(moment.timestamp()) * 1000


def certificate(not_before: datetime, not_after: datetime, serial: int = 1) -> bytes:
    """Return the DER of a certificate with these times, as the library encodes them."""
    key = Ed25519PrivateKey.from_private_bytes(bytes(NODE.key))
    name = x509.Name([x509.NameAttribute(x509.oid.NameOID.COMMON_NAME, "x" * 40)])
    builder = x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key())
    builder = builder.serial_number(serial).not_valid_before(not_before).not_valid_after(not_after)
    return builder.sign(key, None).public_bytes(Encoding.DER)


@pytest.mark.parametrize(
    "der",
    [
        pytest.param(LEAF_DER, id="a-leaf"),
        pytest.param(first_certificate_in(CA.root_pem), id="a-root"),
        pytest.param(
            first_certificate_in(self_signed_leaf(NODE.key, NODE_ID, NOW_MS, 3650, 5)), id="self-signed"
        ),
    ],
)
def test_the_validity_is_what_the_x_509_library_reads(der: bytes) -> None:
    read = x509.load_der_x509_certificate(der)
    expected = (milliseconds(read.not_valid_before_utc), milliseconds(read.not_valid_after_utc))
    assert validity_of(der) == expected


@given(
    st.datetimes(datetime(1950, 1, 1), datetime(9999, 12, 31)),  # noqa: DTZ001 - hypothesis adds the zone
    st.timedeltas(timedelta(0), timedelta(days=365 * 60)),
    st.integers(1, 2**159 - 1),
)
def test_times_of_both_encodings_are_read_to_the_second(
    start: datetime, life: timedelta, serial: int
) -> None:
    begins = start.replace(microsecond=0, tzinfo=UTC)
    try:
        ends = begins + timedelta(seconds=int(life.total_seconds()))
    except OverflowError:
        ends = begins
    assert validity_of(certificate(begins, ends, serial)) == (milliseconds(begins), milliseconds(ends))


def test_utc_time_ends_with_2049_and_generalized_time_goes_on() -> None:
    last, first = datetime(2049, 12, 31, 23, 59, 59, tzinfo=UTC), datetime(2050, 1, 1, tzinfo=UTC)
    der = certificate(last, first)
    assert b"\x17\x0d491231235959Z\x18\x0f20500101000000Z" in der
    assert validity_of(der) == (milliseconds(last), milliseconds(first))


@pytest.mark.parametrize(
    "der",
    [
        pytest.param(b"", id="nothing"),
        pytest.param(b"0", id="a-tag-alone"),
        pytest.param(b"0\x80", id="no-length"),
        pytest.param(b"0\x84\xff\xff\xff\xff", id="longer-than-it-is"),
        pytest.param(b"0\xff" + b"\xff" * 200, id="a-length-beyond-all-numbers"),
        pytest.param(b"hello, this is no certificate", id="prose"),
        pytest.param(LEAF_DER[:-1], id="cut-short"),
        pytest.param(LEAF_DER[1:], id="the-first-byte-is-missing"),
        pytest.param(LEAF_DER.replace(b"\x17\x0d", b"\x04\x0d"), id="a-time-that-is-none"),
        pytest.param(
            certificate(datetime(2026, 1, 1, tzinfo=UTC), datetime(2026, 2, 2, tzinfo=UTC)).replace(
                b"260101000000Z", b"261301000000Z"
            ),
            id="a-month-that-is-none",
        ),
        pytest.param(
            certificate(datetime(2026, 1, 1, tzinfo=UTC), datetime(2026, 2, 2, tzinfo=UTC)).replace(
                b"260101000000Z", b"\xff60101000000Z"
            ),
            id="a-time-that-is-not-ascii",
        ),
    ],
)
def test_of_what_is_no_certificate_the_validity_is_not_told(der: bytes) -> None:
    with pytest.raises(CertificateFormatError):
        validity_of(der)


def only_value_errors(der: bytes) -> None:
    with suppress(CertificateFormatError):
        start, end = validity_of(der)
        assert isinstance(start, int)
        assert isinstance(end, int)


@examples(100, 500)
@given(st.binary(max_size=200))
def test_garbage_is_a_value_error_and_nothing_else(der: bytes) -> None:
    only_value_errors(der)


@examples(200, 1000)
@given(st.integers(0, len(LEAF_DER) - 1), st.binary(min_size=1, max_size=4))
def test_a_damaged_certificate_is_a_value_error_or_still_one(at: int, damage: bytes) -> None:
    only_value_errors(LEAF_DER[:at] + damage + LEAF_DER[at + len(damage) :])
    only_value_errors(LEAF_DER[:at])
