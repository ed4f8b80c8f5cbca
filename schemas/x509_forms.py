"""Builders for the system's X.509 certificates: the common parts of roots, leaves and requests.

Must not sign, and must not verify.
"""

from datetime import UTC, datetime, timedelta

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePublicKey
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
from nacl.signing import SigningKey

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
