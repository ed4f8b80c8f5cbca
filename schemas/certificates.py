"""The X.509 certificates of a node: requests, and the one way in which a leaf is verified.

A leaf is Ed25519, its CN is the node id, its only SAN is ``urn:edge-kubelet:tenant:<tenant>:node:<node_id>``,
and a root issued it directly. Imports the X.509 library, which is large: a running node must not import
this module. Must not read files, clocks or randomness.
"""

import re
import sys
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from enum import StrEnum

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePublicKey
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
    kid_of,
    san_uri,
    serial_of,
)
from schemas.keys import is_sound_public_key
from schemas.projection import NODE_ID_PATTERN, is_node_id

LEAF_RULES = 2
"""The version of the rules of ``verify_leaf``: raised whenever they reject more, since verdicts are kept."""

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
        if not has_positive_serial(der):
            raise IdentityError(IdentityReason.BAD_CERTIFICATE)
        leaf = x509.load_der_x509_certificate(der)
        key = leaf.public_key()
        extensions = leaf.extensions
    except (*_UNREADABLE, CertificateFormatError):
        raise IdentityError(IdentityReason.BAD_CERTIFICATE) from None
    public = _sound_key(key)
    issuers = (_issuer(leaf, der, root, now_ms) for root in roots)
    issuer = next((kid for kid in issuers if kid is not None), None)
    if issuer is None:
        raise IdentityError(IdentityReason.CHAIN)
    tenant, node_id = _subject_of(leaf, extensions)
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


def _subject_of(leaf: x509.Certificate, extensions: x509.Extensions) -> tuple[str, str]:
    try:
        basic = extensions.get_extension_for_class(x509.BasicConstraints).value
        names = extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        raise IdentityError(IdentityReason.WRONG_FORM) from None
    uris = names.get_values_for_type(x509.UniformResourceIdentifier)
    match = _SAN.fullmatch(uris[0]) if len(uris) == len(names) == 1 else None
    common_names = leaf.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    if match is None or basic.ca or len(common_names) != 1:
        raise IdentityError(IdentityReason.WRONG_FORM)
    if common_names[0].value != match["node"]:
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
