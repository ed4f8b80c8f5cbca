import base64

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)
from hypothesis import given
from hypothesis import strategies as st
from nacl.signing import SigningKey

from schemas.keys import (
    KeyFormatError,
    base64url,
    from_base64url,
    is_sound_public_key,
    private_key_from_pem,
    private_key_to_pem,
    verifies,
)
from tests.fakes.signer import LOW_ORDER_KEYS, key_named

# RFC 8410 section 10.3, and the public key of section 10.1 that belongs to it.
RFC_8410_PEM = """-----BEGIN PRIVATE KEY-----
MC4CAQAwBQYDK2VwBCIEINTuctv5E1hK1bbY8fdp+K06/nwoy/HU++CXqI9EdVhC
-----END PRIVATE KEY-----
"""
RFC_8410_PUBLIC = base64.b64decode("Gb9ECWmEzf6FQbrBZ9w7lshQhqowtrbLDFw4rXAxZuE=")

# RFC 8032 section 7.1, test 1: the signature of the empty message.
RFC_8032_SEED = bytes.fromhex("9d61b19deffd5a60ba844af492ec2cc44449c5697b326919703bac031cae7f60")
RFC_8032_PUBLIC = bytes.fromhex("d75a980182b10ab7d54bfed3c964073a0ee172f3daa62325af021a68f707511a")
RFC_8032_SIGNATURE = bytes.fromhex(
    "e5564300c360ac729086e2cc806e828a84877f1eb8e5d974d873e065224901555"
    "fb8821590a33bacc61e39701cf9b46bd25bf5f0595bbe24655141438e7a100b"
)

KEY = key_named("keys")
ED25519 = Ed25519PrivateKey.from_private_bytes(bytes(KEY))


def test_a_key_file_is_read_as_rfc_8410_writes_it() -> None:
    assert bytes(private_key_from_pem(RFC_8410_PEM).verify_key) == RFC_8410_PUBLIC


def test_a_key_file_is_written_as_rfc_8410_writes_it() -> None:
    assert private_key_to_pem(private_key_from_pem(RFC_8410_PEM)) == RFC_8410_PEM


@given(st.binary(min_size=32, max_size=32))
def test_a_key_comes_back_from_its_file(seed: bytes) -> None:
    assert bytes(private_key_from_pem(private_key_to_pem(SigningKey(seed)))) == seed


def test_the_certificate_library_reads_the_key_file_too() -> None:
    loaded = load_pem_private_key(private_key_to_pem(KEY).encode(), None)
    assert isinstance(loaded, Ed25519PrivateKey)
    assert loaded.private_bytes_raw() == bytes(KEY)


def test_white_space_around_and_inside_a_key_file_does_not_matter() -> None:
    body = private_key_to_pem(KEY)
    assert private_key_from_pem("\n" + body.replace("\n", "\r\n") + "\n\n") == KEY


def pem(der: bytes, label: str = "PRIVATE KEY") -> str:
    return f"-----BEGIN {label}-----\n{base64.b64encode(der).decode()}\n-----END {label}-----\n"


PREFIX = bytes.fromhex("302e020100300506032b657004220420")
PKCS8 = (Encoding.PEM, PrivateFormat.PKCS8)


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("", id="nothing"),
        pytest.param("hello", id="no-pem"),
        pytest.param(pem(PREFIX + bytes(31)), id="31-bytes"),
        pytest.param(pem(PREFIX + bytes(33)), id="33-bytes"),
        pytest.param(pem(bytes(32)), id="the-bare-seed"),
        pytest.param(pem(PREFIX), id="no-seed"),
        pytest.param(pem(PREFIX + bytes(32), "PUBLIC KEY"), id="another-label"),
        pytest.param("-----BEGIN PRIVATE KEY-----\nAAAAA\n-----END PRIVATE KEY-----\n", id="broken-base64"),
        pytest.param(pem(PREFIX + bytes(32)) * 2, id="two-keys"),
        pytest.param("x" + pem(PREFIX + bytes(32)), id="text-in-front"),
        pytest.param(
            ED25519.private_bytes(*PKCS8, BestAvailableEncryption(b"pass")).decode(), id="an-encrypted-key"
        ),
        pytest.param(
            X25519PrivateKey.from_private_bytes(bytes(KEY)).private_bytes(*PKCS8, NoEncryption()).decode(),
            id="a-key-of-another-algorithm",
        ),
    ],
)
def test_anything_but_an_unencrypted_ed25519_key_is_refused(text: str) -> None:
    with pytest.raises(KeyFormatError) as caught:
        private_key_from_pem(text)
    assert str(caught.value) == "not an Ed25519 private key in PKCS #8 PEM"


@pytest.mark.parametrize("low", LOW_ORDER_KEYS.values(), ids=LOW_ORDER_KEYS)
def test_a_point_of_low_order_is_no_sound_key(low: bytes) -> None:
    assert not is_sound_public_key(low)


@pytest.mark.parametrize(
    "key",
    [
        pytest.param(b"", id="nothing"),
        pytest.param(bytes(KEY.verify_key)[:31], id="31-bytes"),
        pytest.param(bytes(KEY.verify_key) + b"\0", id="33-bytes"),
        pytest.param(b"\xff" * 32, id="not-reduced"),
        pytest.param(b"\x02" + bytes(31), id="not-on-the-curve"),
        # -y for y: the negative of a point of the main subgroup plus the point of order two.
        pytest.param(
            (2**255 - 19 - int.from_bytes(RFC_8032_PUBLIC, "little") % 2**255).to_bytes(32, "little"),
            id="outside-the-main-subgroup",
        ),
    ],
)
def test_what_is_no_point_of_the_main_subgroup_is_no_sound_key(key: bytes) -> None:
    assert not is_sound_public_key(key)


def test_an_honest_key_is_sound() -> None:
    assert is_sound_public_key(RFC_8032_PUBLIC)


def test_the_signature_of_rfc_8032_verifies() -> None:
    assert SigningKey(RFC_8032_SEED).sign(b"").signature == RFC_8032_SIGNATURE
    assert verifies(RFC_8032_PUBLIC, b"", RFC_8032_SIGNATURE)


@pytest.mark.parametrize(
    ("key", "message", "signature"),
    [
        pytest.param(RFC_8032_PUBLIC, b"x", RFC_8032_SIGNATURE, id="another-message"),
        pytest.param(bytes(KEY.verify_key), b"", RFC_8032_SIGNATURE, id="another-key"),
        pytest.param(RFC_8032_PUBLIC, b"", RFC_8032_SIGNATURE[:63], id="a-short-signature"),
        pytest.param(RFC_8032_PUBLIC, b"", RFC_8032_SIGNATURE + b"\0", id="a-long-signature"),
        pytest.param(RFC_8032_PUBLIC, b"", b"", id="no-signature"),
        pytest.param(RFC_8032_PUBLIC[:31], b"", RFC_8032_SIGNATURE, id="a-short-key"),
        pytest.param(b"", b"", RFC_8032_SIGNATURE, id="no-key"),
    ],
)
def test_any_other_signature_does_not_verify(key: bytes, message: bytes, signature: bytes) -> None:
    assert not verifies(key, message, signature)


def test_a_signature_with_any_bit_flipped_does_not_verify() -> None:
    for bit in range(512):
        flipped = bytearray(RFC_8032_SIGNATURE)
        flipped[bit // 8] ^= 1 << bit % 8
        assert not verifies(RFC_8032_PUBLIC, b"", bytes(flipped)), bit


def test_a_second_spelling_of_a_signature_does_not_verify() -> None:
    # S + L is the same number modulo the group's order L, and must be refused for it.
    order = 2**252 + 27742317777372353535851937790883648493
    s = int.from_bytes(RFC_8032_SIGNATURE[32:], "little") + order
    assert not verifies(RFC_8032_PUBLIC, b"", RFC_8032_SIGNATURE[:32] + s.to_bytes(32, "little"))


@given(st.binary(max_size=70))
def test_base64url_has_no_padding_and_is_read_back(data: bytes) -> None:
    text = base64url(data)
    assert "=" not in text
    assert from_base64url(text) == data


def test_base64url_uses_the_url_alphabet() -> None:
    assert base64url(b"\xfb\xff\xfe") == "-__-"


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("+//+", id="the-other-alphabet"),
        pytest.param("AA==", id="padding"),
        pytest.param("AB", id="stray-bits"),
        pytest.param("A", id="a-length-that-cannot-be"),
        pytest.param("AAAA\n", id="a-line-feed-at-the-end"),
        pytest.param("AA AA", id="a-space"),
        pytest.param("A\u0661AA", id="a-digit-of-another-script"),
    ],
)
def test_a_second_spelling_in_base64url_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"base64|encoded"):
        from_base64url(text)
