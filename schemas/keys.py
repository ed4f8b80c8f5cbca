"""Ed25519 keys: what is a usable key, how it signs, and how it lies in a file.

Key files are PKCS #8 PEM, as openssl writes them. For Ed25519 that is a fixed prefix and 32 bytes, so they
are read here without the certificate library, which costs a node more memory than all the rest. Must not
read or write files, and must never put a secret into an exception.
"""

import base64
import binascii
import re

from nacl.bindings import crypto_core_ed25519_is_valid_point
from nacl.exceptions import BadSignatureError
from nacl.signing import SigningKey, VerifyKey

from schemas.error_roots import StateError

_PKCS8_ED25519 = bytes.fromhex("302e020100300506032b657004220420")
_PEM = re.compile(r"-----BEGIN PRIVATE KEY-----\s+([A-Za-z0-9+/=\s]+)-----END PRIVATE KEY-----\s*")
_PUBLIC_KEY_BYTES = 32
_SEED_BYTES = 32
_BASE64URL = re.compile(r"[A-Za-z0-9_-]*")


class KeyFormatError(StateError):
    """The text is not an unencrypted Ed25519 private key in PKCS #8 PEM."""


def private_key_to_pem(key: SigningKey) -> str:
    """Return ``key`` as PKCS #8 PEM."""
    body = base64.b64encode(_PKCS8_ED25519 + bytes(key)).decode("ascii")
    return f"-----BEGIN PRIVATE KEY-----\n{body}\n-----END PRIVATE KEY-----\n"


def private_key_from_pem(pem: str) -> SigningKey:
    """Return the key that ``pem`` holds.

    Raises:
        KeyFormatError: it holds something else.
    """
    match = _PEM.fullmatch(pem.strip())
    try:
        der = base64.b64decode(match.group(1)) if match else b""
    except binascii.Error:
        der = b""
    seed = der.removeprefix(_PKCS8_ED25519)
    if not der.startswith(_PKCS8_ED25519) or len(seed) != _SEED_BYTES:
        raise KeyFormatError("not an Ed25519 private key in PKCS #8 PEM")
    return SigningKey(seed)


def is_sound_public_key(key: bytes) -> bool:
    """Return whether ``key`` is a point of the main subgroup.

    A low-order point must not pass: one signature can verify under it for any message.
    """
    return len(key) == _PUBLIC_KEY_BYTES and bool(crypto_core_ed25519_is_valid_point(key))


def verifies(public_key: bytes, message: bytes, signature: bytes) -> bool:
    """Return whether ``signature`` over ``message`` was made by the owner of ``public_key``."""
    try:
        VerifyKey(public_key).verify(message, signature)
    except (BadSignatureError, ValueError):
        return False
    return True


def base64url(data: bytes) -> str:
    """Return ``data`` in base64url without padding."""
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode("ascii")


def from_base64url(text: str) -> bytes:
    """Return the bytes of ``text``, in the one spelling that ``base64url`` gives them.

    Raises:
        ValueError: another alphabet, padding, or stray bits at the end.
    """
    if not _BASE64URL.fullmatch(text):
        raise ValueError("not base64url")
    data = base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))
    if base64url(data) != text:
        raise ValueError("not canonical base64url")
    return data
