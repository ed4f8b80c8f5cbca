"""The X.509 certificates of a node: requests, the one way in which a leaf is verified, and endorsements.

A leaf is Ed25519, its CN is the node id, its only SAN is ``urn:edge-kubelet:tenant:<tenant>:node:<node_id>``,
and a root issued it directly. Trust passes from a root of nodes to other keys by a signature with the root's
key: roots are public, so to come together with a trusted one proves nothing. Endorsed are the root after a
rotation; the roots of servers, which are trusted for servers alone; and the keys of agents' tokens. Imports
the X.509 library, which is large: a running node must not import this module. Must not read files, clocks or
randomness, and must not decide which roots are trusted.
"""

import re
import sys
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from hashlib import sha256
from typing import NamedTuple

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, EllipticCurvePublicKey
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
from nacl.signing import SigningKey

from schemas.error_roots import PeerError
from schemas.identity import (
    MAX_PEM_BYTES,
    TENANT_PATTERN,
    CertificateFormatError,
    Identity,
    certificates_in,
    first_certificate_in,
    has_positive_serial,
    issued_as,
    kid_of,
    san_uri,
    serial_of,
)
from schemas.keys import base64url, from_base64url, is_sound_public_key, verifies
from schemas.projection import NODE_ID_PATTERN, is_node_id

LEAF_RULES = 2
"""The version of the rules of ``verify_leaf``: raised whenever they reject more, since verdicts are kept."""

RELAY_NAME = "edge-relay"
"""The common name by which a broker knows the relay. It is no node id."""
RELAY_URI = "urn:edge-kubelet:relay"
"""The other name of the relay's certificate for the broker: no node's has this form."""
_NAME_DIGITS = 16
"""Of the digest of a relay's key. Another key with these is no certificate: the CA chooses no name."""
_RELAY_NAME = re.compile(rf"{RELAY_NAME}-[0-9a-f]{{{_NAME_DIGITS}}}")

UNENROLLED_TENANT = "unenrolled"
"""The tenant in a leaf that a node signed for itself, until a CA's arrives."""

_SAN = re.compile(rf"urn:edge-kubelet:tenant:(?P<tenant>{TENANT_PATTERN}):node:(?P<node>{NODE_ID_PATTERN})")
# What the library raises for DER that is hostile or merely odd; most of these are no ValueError.
_UNREADABLE = (
    ValueError,
    UnsupportedAlgorithm,
    x509.DuplicateExtension,
    x509.InvalidVersion,
    x509.UnsupportedGeneralNameType,
)


class IdentityReason(StrEnum):
    """Why a certificate, or a request for one, is rejected; fit for a counter's label."""

    BAD_CERTIFICATE = "bad_certificate"
    WRONG_FORM = "wrong_form"
    NOT_ED25519 = "not_ed25519"
    LOW_ORDER_KEY = "low_order_key"
    CHAIN = "chain"
    VALIDITY = "validity"
    ID_MISMATCH = "id_mismatch"
    REVOKED = "revoked"
    NOT_A_REQUEST = "not_a_request"
    NO_PROOF_OF_POSSESSION = "no_proof_of_possession"
    NOT_A_NODE_ID = "not_a_node_id"
    NOT_A_TENANT = "not_a_tenant"
    NOT_A_HOST = "not_a_host"
    NOT_A_NAME = "not_a_name"
    ROOT_TOO_OLD = "root_too_old"


class IdentityError(PeerError):
    """A certificate is rejected."""

    def __init__(self, reason: IdentityReason) -> None:
        super().__init__(reason)
        self.reason = reason


def make_csr(key: SigningKey, node_id: str) -> str:
    """Return a certificate request for ``node_id`` in PEM; its signature proves possession of ``key``."""
    builder = x509.CertificateSigningRequestBuilder().subject_name(name_of(node_id))
    return builder.sign(private(key), None).public_bytes(Encoding.PEM).decode("ascii")


def read_csr(pem: str) -> tuple[str, bytes]:
    """Return ``(node_id, public_key)`` of a certificate request whose signature holds.

    Raises:
        IdentityError: not a request, not Ed25519, a low-order key, a bad signature, or no node id.
    """
    try:
        request = x509.load_pem_x509_csr(pem[:MAX_PEM_BYTES].encode("ascii"))
        key = request.public_key()
        common_names = request.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    except _UNREADABLE:
        raise IdentityError(IdentityReason.NOT_A_REQUEST) from None
    public = _sound_key(key)
    if not request.is_signature_valid:
        raise IdentityError(IdentityReason.NO_PROOF_OF_POSSESSION)
    node_id = str(common_names[0].value) if len(common_names) == 1 else ""
    if not is_node_id(node_id):
        raise IdentityError(IdentityReason.NOT_A_NODE_ID)
    return node_id, public


def self_signed_leaf(key: SigningKey, node_id: str, now_ms: int, valid_days: int, serial: int) -> str:
    """Return the self-signed leaf that a node uses until a CA issues one. Only the node itself trusts it."""
    san = san_uri(UNENROLLED_TENANT, node_id)
    builder = client_builder(bytes(key.verify_key), node_id, san, now_ms, valid_days)
    return pem_of(builder.issuer_name(name_of(node_id)).serial_number(serial).sign(private(key), None))


def verify_leaf(pem: str, roots: Sequence[str], now_ms: int) -> Identity:
    """Return the identity of the first certificate in ``pem`` if one of ``roots`` (PEM) has issued it.

    Certificates after the first are not needed: a root issues leaves directly, and the verifier has its own.

    Raises:
        IdentityError: with reason ``bad_certificate``, ``not_ed25519``, ``low_order_key``, ``chain``,
            ``wrong_form``, ``id_mismatch`` or ``validity``.
    """
    try:
        der = first_certificate_in(pem)
    except CertificateFormatError:
        raise IdentityError(IdentityReason.BAD_CERTIFICATE) from None
    leaf, public, issuer = _issued_by(der, roots, now_ms)
    tenant, node_id = _subject_of(leaf)
    identity = Identity(
        node_id=node_id,
        tenant=tenant,
        kid=kid_of(der),
        public_key=public,
        not_before_ms=_milliseconds(leaf.not_valid_before_utc),
        not_after_ms=_milliseconds(leaf.not_valid_after_utc),
        pem=pem_of(leaf),
        root_kid=sys.intern(issuer),
        serial=serial_of(der),
    )
    if not identity.valid_at(now_ms):
        raise IdentityError(IdentityReason.VALIDITY)
    return identity


def _issued_by(der: bytes, roots: Sequence[str], now_ms: int) -> tuple[x509.Certificate, bytes, str]:
    """Return the certificate ``der``, its key, and the kid of the root that has issued it.

    Raises:
        IdentityError: ``bad_certificate``, ``not_ed25519``, ``low_order_key`` or ``chain``.
    """
    try:
        if not has_positive_serial(der):
            raise IdentityError(IdentityReason.BAD_CERTIFICATE)
        certificate = x509.load_der_x509_certificate(der)
        key = certificate.public_key()
        _ = certificate.extensions  # parsed here for the first time
    except (*_UNREADABLE, CertificateFormatError):
        raise IdentityError(IdentityReason.BAD_CERTIFICATE) from None
    public = _sound_key(key)
    issuers = (_issuer(certificate, der, root, now_ms) for root in roots)
    issuer = next((kid for kid in issuers if kid is not None), None)
    if issuer is None:
        raise IdentityError(IdentityReason.CHAIN)
    return certificate, public, issuer


class RelayCertificate(NamedTuple):
    """The certificate by which a relay proves to the others of its fleet which one it is.

    Attributes:
        name: follows from the key, so that no certificate for another key can have it.
    """

    name: str
    public_key: bytes
    kid: str
    root_kid: str
    issued_as: str
    not_before_ms: int
    not_after_ms: int

    def valid_at(self, now_ms: int) -> bool:
        return self.not_before_ms <= now_ms < self.not_after_ms


def relay_name(public_key: bytes) -> str:
    """Return what a relay with that key is called: the common name of its certificate."""
    return f"{RELAY_NAME}-{sha256(public_key).hexdigest()[:_NAME_DIGITS]}"


def is_relay_name(text: str) -> bool:
    """Return whether a relay can be called so."""
    return _RELAY_NAME.fullmatch(text) is not None


def relay_uri(name: str) -> str:
    """Return the other name in the certificate of a relay."""
    return f"{RELAY_URI}:{name}"


def verify_relay(der: bytes, roots: Sequence[str], now_ms: int) -> RelayCertificate:
    """Return what the certificate ``der`` of a relay says if one of ``roots`` (PEM), valid now, issued it.

    Whether the certificate itself is valid now is the caller's to judge: what it has signed may be older.

    Raises:
        IdentityError: with a reason as those of ``verify_leaf``, but for ``validity``.
    """
    certificate, public, issuer = _issued_by(der, roots, now_ms)
    name, uris = _names_of(certificate)
    if name != relay_name(public) or uris != [relay_uri(name)]:
        raise IdentityError(IdentityReason.ID_MISMATCH)
    return RelayCertificate(
        name,
        public,
        kid_of(der),
        issuer,
        issued_as(issuer, serial_of(der)),
        _milliseconds(certificate.not_valid_before_utc),
        _milliseconds(certificate.not_valid_after_utc),
    )


def end_of(pem: str) -> int:
    """Return when the validity of one's own certificate ends, in ms since the epoch."""
    return _milliseconds(x509.load_pem_x509_certificate(pem.encode("ascii")).not_valid_after_utc)


def _issuer(leaf: x509.Certificate, leaf_der: bytes, root_pem: str, now_ms: int) -> str | None:
    """Return the thumbprint of the certificate in ``root_pem`` that issued ``leaf``; None if none did."""
    for der in certificates_in(root_pem):
        if der == leaf_der:
            # The anchor is this very certificate: a node that checks its own self-signed leaf.
            return kid_of(der)
        try:
            root = x509.load_der_x509_certificate(der)
            basic = root.extensions.get_extension_for_class(x509.BasicConstraints).value
            # A root of servers issues no leaf of a node, wherever it was installed.
            nodes_root = isinstance(root.public_key(), Ed25519PublicKey)
            if (
                nodes_root
                and basic.ca
                and root.not_valid_before_utc <= moment(now_ms) < root.not_valid_after_utc
            ):
                leaf.verify_directly_issued_by(root)
                return kid_of(der)
        except (ValueError, TypeError, InvalidSignature, UnsupportedAlgorithm, x509.ExtensionNotFound):
            continue
    return None


def _names_of(certificate: x509.Certificate) -> tuple[str, list[str]]:
    """Return the common name and the one other name, a URI, of a certificate that is no CA's.

    Raises:
        IdentityError: ``wrong_form``.
    """
    extensions = certificate.extensions
    try:
        basic = extensions.get_extension_for_class(x509.BasicConstraints).value
        names = extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        raise IdentityError(IdentityReason.WRONG_FORM) from None
    uris = names.get_values_for_type(x509.UniformResourceIdentifier)
    common_names = certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    if basic.ca or len(common_names) != 1 or not len(uris) == len(names) == 1:
        raise IdentityError(IdentityReason.WRONG_FORM)
    return str(common_names[0].value), uris


def _subject_of(leaf: x509.Certificate) -> tuple[str, str]:
    name, uris = _names_of(leaf)
    if (match := _SAN.fullmatch(uris[0])) is None:
        raise IdentityError(IdentityReason.WRONG_FORM)
    if name != match["node"]:
        raise IdentityError(IdentityReason.ID_MISMATCH)
    return match["tenant"], match["node"]


def _sound_key(key: object) -> bytes:
    if not isinstance(key, Ed25519PublicKey):
        raise IdentityError(IdentityReason.NOT_ED25519)
    raw = key.public_bytes(Encoding.Raw, PublicFormat.Raw)
    if not is_sound_public_key(raw):
        raise IdentityError(IdentityReason.LOW_ORDER_KEY)
    return raw


def _milliseconds(moment: datetime) -> int:
    return int(moment.timestamp()) * 1000


CLOCK_SKEW = timedelta(minutes=5)


def builder_for(  # noqa: PLR0913, PLR0917 - the fields that all end-entity certificates have
    public_key: Ed25519PublicKey | EllipticCurvePublicKey,
    common_name: str,
    names: list[x509.GeneralName],
    usages: list[x509.ObjectIdentifier],
    now_ms: int,
    valid_days: int,
) -> x509.CertificateBuilder:
    """Return the unsigned form of an end-entity certificate, without issuer and serial."""
    start = moment(now_ms)
    return (
        x509.CertificateBuilder()
        .subject_name(name_of(common_name))
        .public_key(public_key)
        .not_valid_before(start - CLOCK_SKEW)
        .not_valid_after(start + timedelta(days=valid_days))
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(key_usage(ca=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage(usages), critical=False)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
    )


def client_builder(
    public_key: bytes, common_name: str, san: str, now_ms: int, valid_days: int
) -> x509.CertificateBuilder:
    """Return the unsigned form of a client's certificate: of a node, or of the relay at the broker."""
    names: list[x509.GeneralName] = [x509.UniformResourceIdentifier(san)]
    usages = [ExtendedKeyUsageOID.CLIENT_AUTH]  # none of them is ever a TLS server
    key = Ed25519PublicKey.from_public_bytes(public_key)
    return builder_for(key, common_name, names, usages, now_ms, valid_days)


def key_usage(*, ca: bool) -> x509.KeyUsage:
    """Return the key usage: a CA's key signs certificates and CRLs, any other key signs data."""
    return x509.KeyUsage(
        digital_signature=not ca,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=ca,
        crl_sign=ca,
        encipher_only=False,
        decipher_only=False,
    )


def private(key: SigningKey) -> Ed25519PrivateKey:
    """Return ``key`` as the X.509 library's type."""
    return Ed25519PrivateKey.from_private_bytes(bytes(key))


def name_of(common_name: str) -> x509.Name:
    """Return a name that consists of a common name only."""
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])


def pem_of(certificate: x509.Certificate) -> str:
    """Return ``certificate`` in PEM."""
    return certificate.public_bytes(Encoding.PEM).decode("ascii")


def moment(now_ms: int) -> datetime:
    """Return the whole second of ``now_ms``: certificates have no fractions of a second."""
    return datetime.fromtimestamp(now_ms // 1000, UTC)


# With no other signature of this key can these be mixed up: what X.509 signs begins with 0x30, a sequence.
_CONTEXT = b"edge-kubelet root\n"
_SERVERS_CONTEXT = b"edge-kubelet server roots\n"
_TOKEN_KEY_CONTEXT = b"edge-kubelet token key\n"
_SEAL_CONTEXT = b"edge-kubelet cluster seal\n"


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


def endorse_seal(root_key: SigningKey, statement: bytes) -> str:
    """Return the endorsement that relays of the fleet seal what they say, by a root of nodes."""
    return base64url(root_key.sign(_SEAL_CONTEXT + statement).signature)


def is_seal_endorsed(statement: bytes, trusted: Iterable[bytes], endorsement: str) -> bool:
    """Return whether one of the roots ``trusted``, which are DER, has signed ``endorsement``."""
    return _is_signed(_SEAL_CONTEXT + statement, trusted, endorsement)


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
