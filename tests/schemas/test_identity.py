import base64
from dataclasses import FrozenInstanceError, replace
from hashlib import sha256

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding

from schemas.identity import MAX_PEM_BYTES, certificates_in, kid_of, san_uri
from tests.fakes.signer import DAY_MS, NODE_ID, NOW_MS, SimulatedCa

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
    with pytest.raises(ValueError, match="a certificate is not base64"):
        certificates_in("-----BEGIN CERTIFICATE-----\nAAAAA\n-----END CERTIFICATE-----\n")


def test_a_text_over_the_limit_is_an_error() -> None:
    fitting = pem(b"one").ljust(MAX_PEM_BYTES)
    assert certificates_in(fitting) == [b"one"]
    with pytest.raises(ValueError, match="too large"):
        certificates_in(fitting + " ")


def test_the_kid_is_the_sha_256_thumbprint_of_the_leaf() -> None:
    leaf = x509.load_pem_x509_certificate(NODE.leaf_pem.encode())
    assert kid_of(certificates_in(NODE.leaf_pem)[0]) == leaf.fingerprint(SHA256()).hex() == NODE.kid


def test_the_kid_of_known_bytes() -> None:
    assert kid_of(b"abc") == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    assert kid_of(b"") == sha256().hexdigest()


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
