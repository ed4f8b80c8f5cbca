"""How trust passes from one root to the next: a signature with the old root's key.

Roots are public, so to come together with one that is trusted proves nothing of a root. Imports the X.509
library: a running node must not import this module. Must not decide which roots are trusted.
"""

from collections.abc import Iterable

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from nacl.signing import SigningKey

from schemas.identity import certificates_in
from schemas.keys import base64url, from_base64url, is_sound_public_key, verifies

# With no other signature of this key can it be mixed up: what X.509 signs begins with 0x30, a sequence.
_CONTEXT = b"edge-kubelet root\n"


def endorse(old_key: SigningKey, new_root_pem: str) -> str:
    """Return the endorsement of a new root by the key of the root before it, in base64url."""
    (der,) = certificates_in(new_root_pem)
    return base64url(old_key.sign(_CONTEXT + der).signature)


def is_endorsed(root: bytes, trusted: Iterable[bytes], endorsement: str) -> bool:
    """Return whether one of the roots ``trusted`` has signed ``endorsement`` of ``root``; all are DER."""
    try:
        signature = from_base64url(endorsement)
    except ValueError:
        return False
    keys = filter(is_sound_public_key, map(_public_key, trusted))
    return any(verifies(key, _CONTEXT + root, signature) for key in keys)


def _public_key(root: bytes) -> bytes:
    """Return the key of a root, or nothing if it is none of Ed25519."""
    try:
        key = x509.load_der_x509_certificate(root).public_key()
    except (ValueError, UnsupportedAlgorithm, x509.InvalidVersion):
        return b""
    return key.public_bytes(Encoding.Raw, PublicFormat.Raw) if isinstance(key, Ed25519PublicKey) else b""
