"""The P-256 keys of the server root and of servers, as files: PKCS #8 PEM, mode 0600.

Clients with BoringSSL, and Go's, refuse Ed25519 in TLS: see decision 0047. Nodes never have such a key.
Must not know what a key is for, and must not put a byte of one into an error.
"""

from collections.abc import Callable
from pathlib import Path

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ec import (
    SECP256R1,
    EllipticCurvePrivateKey,
    derive_private_key,
)
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)

from relay.state.key_files import KeyFileError, load_or_create
from schemas.files import read_private

_ORDER = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551
# FIPS 186-5, A.2.1: 64 more bits than the order has, so that the remainder is not biased.
_RANDOM_BYTES = 40


def make_server_key(random_bytes: Callable[[int], bytes]) -> EllipticCurvePrivateKey:
    """Return a new key."""
    secret = int.from_bytes(random_bytes(_RANDOM_BYTES), "big") % (_ORDER - 1) + 1
    return derive_private_key(secret, SECP256R1())


def server_key_to_pem(key: EllipticCurvePrivateKey) -> str:
    """Return ``key`` as PKCS #8 PEM."""
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()).decode("ascii")


def read_server_key(path: Path) -> EllipticCurvePrivateKey:
    """Return the key in ``path``.

    Raises:
        FileNotFoundError: there is none.
        KeyFileError: the file is damaged, or holds a key of another kind.
        ExposedFileError: others can read it.
    """
    try:
        key = load_pem_private_key(read_private(path).encode("utf-8"), None)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        # Without the error's own text, which can show a part of the key.
        raise KeyFileError(f"{path} is damaged: it holds no key") from None
    if not isinstance(key, EllipticCurvePrivateKey) or not isinstance(key.curve, SECP256R1):
        raise KeyFileError(f"{path} holds no P-256 key")
    return key


def load_or_create_server_key(path: Path, random_bytes: Callable[[int], bytes]) -> EllipticCurvePrivateKey:
    """Return the key in ``path``, made on first use, as ``load_or_create`` does."""
    return load_or_create(path, read_server_key, lambda: make_server_key(random_bytes), server_key_to_pem)
