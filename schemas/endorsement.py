"""How trust passes from a root of nodes to other keys: a signature with the trusted root's key.

Roots are public, so to come together with one that is trusted proves nothing of a root. Endorsed are the root
after a rotation; the roots of servers, which are trusted for servers alone; and the keys of agents' tokens.
Imports the X.509 library: a running node must not import this module. Must not decide which roots are
trusted.
"""

from collections.abc import Iterable, Sequence

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, EllipticCurvePublicKey
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from cryptography.x509.oid import ExtendedKeyUsageOID
from nacl.signing import SigningKey

from schemas.identity import certificates_in
from schemas.keys import base64url, from_base64url, is_sound_public_key, verifies

# With no other signature of this key can these be mixed up: what X.509 signs begins with 0x30, a sequence.
_CONTEXT = b"edge-kubelet root\n"
_SERVERS_CONTEXT = b"edge-kubelet server roots\n"
_TOKEN_KEY_CONTEXT = b"edge-kubelet token key\n"


def endorse(old_key: SigningKey, new_root_pem: str) -> str:
    """Return the endorsement of a new root by the key of the root before it, in base64url."""
    (der,) = certificates_in(new_root_pem)
    return base64url(old_key.sign(_CONTEXT + der).signature)


def is_endorsed(root: bytes, trusted: Iterable[bytes], endorsement: str) -> bool:
    """Return whether one of the roots ``trusted`` has signed ``endorsement`` of ``root``; all are DER."""
    return _is_signed(_CONTEXT + root, trusted, endorsement)


def endorse_servers(root_key: SigningKey, server_roots_pem: str) -> str:
    """Return the endorsement of all ``server_roots_pem``, in their order, by the key of a root of nodes."""
    signed = _SERVERS_CONTEXT + b"".join(certificates_in(server_roots_pem))
    return base64url(root_key.sign(signed).signature)


def are_endorsed(
    server_roots: Sequence[bytes], trusted: Iterable[bytes], endorsements: Sequence[str]
) -> bool:
    """Return whether one of the roots ``trusted`` endorses ``server_roots``, all of them and no others.

    All are DER. Each must be a root of servers: an endorsement makes nothing else of it.
    """
    if not server_roots or not all(map(is_server_root, server_roots)):
        return False
    signed, known = _SERVERS_CONTEXT + b"".join(server_roots), tuple(trusted)
    return any(_is_signed(signed, known, each) for each in endorsements)


def endorse_token_key(root_key: SigningKey, statement: bytes) -> str:
    """Return the endorsement of what ``statement`` says of a key of agents' tokens, by a root of nodes."""
    return base64url(root_key.sign(_TOKEN_KEY_CONTEXT + statement).signature)


def is_token_key_endorsed(statement: bytes, trusted: Iterable[bytes], endorsement: str) -> bool:
    """Return whether one of the roots ``trusted``, which are DER, has signed ``endorsement``."""
    return _is_signed(_TOKEN_KEY_CONTEXT + statement, trusted, endorsement)


def is_server_root(der: bytes) -> bool:
    """Return whether ``der`` is a CA with a P-256 key, restricted to servers: no root of nodes is one."""
    try:
        certificate = x509.load_der_x509_certificate(der)
        key = certificate.public_key()
        basic = certificate.extensions.get_extension_for_class(x509.BasicConstraints).value
        usages = certificate.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    except (ValueError, UnsupportedAlgorithm, x509.InvalidVersion, x509.ExtensionNotFound):
        return False
    is_p256 = isinstance(key, EllipticCurvePublicKey) and isinstance(key.curve, SECP256R1)
    return is_p256 and basic.ca and list(usages) == [ExtendedKeyUsageOID.SERVER_AUTH]


def _is_signed(message: bytes, trusted: Iterable[bytes], endorsement: str) -> bool:
    try:
        signature = from_base64url(endorsement)
    except ValueError:
        return False
    keys = filter(is_sound_public_key, map(_public_key, trusted))
    return any(verifies(key, message, signature) for key in keys)


def _public_key(root: bytes) -> bytes:
    """Return the key of a root, or nothing if it is none of Ed25519."""
    try:
        key = x509.load_der_x509_certificate(root).public_key()
    except (ValueError, UnsupportedAlgorithm, x509.InvalidVersion):
        return b""
    return key.public_bytes(Encoding.Raw, PublicFormat.Raw) if isinstance(key, Ed25519PublicKey) else b""
