"""Who a node is: the verified facts of its leaf certificate, and the leaf's thumbprint.

Only the cheap half: PEM, thumbprints and the record. What needs an X.509 library is in ``certificates``,
which a running node never imports. Must not trust a certificate.
"""

import base64
import binascii
import re
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from hashlib import sha256
from ssl import DER_cert_to_PEM_cert

from schemas.error_roots import EdgeError

TENANT_PATTERN = r"[a-z0-9][a-z0-9_-]{0,62}"
MAX_PEM_BYTES = 16 * 1024

_SPKI_ED25519 = bytes.fromhex("302a300506032b6570032100")
_VERSION = 0xA0
_UTC_TIME = 0x17
_GENERALIZED_TIME = 0x18
_FIRST_OF_1900 = b"50"
"""From here on, two digits of a year follow 19, before it 20 (RFC 5280 section 4.1.2.5.1)."""
_TIME = re.compile(rb"(\d{4})(\d\d)(\d\d)(\d\d)(\d\d)(\d\d)Z")
_CERTIFICATE = re.compile(r"-----BEGIN CERTIFICATE-----([A-Za-z0-9+/=\s]+?)-----END CERTIFICATE-----")


class CertificateFormatError(EdgeError):
    """What should be a certificate is not one. Whose fault that is, its reader knows."""


@dataclass(frozen=True, slots=True)
class Identity:
    """A leaf that chains to a trusted root (RFC-0001 decision 1): built by ``certificates.verify_leaf``.

    ``kid`` is the SHA-256 of the leaf's DER in hex, ``root_kid`` that of the root that issued it,
    ``public_key`` 32 raw bytes, times are milliseconds since the epoch, ``pem`` is the leaf alone, ``serial``
    its serial number: a revocation asks for that of every leaf of the fleet, too often to parse them.
    """

    node_id: str
    tenant: str
    kid: str
    public_key: bytes
    not_before_ms: int
    not_after_ms: int
    pem: str
    root_kid: str
    serial: int

    @property
    def issued_as(self) -> str:
        """The issuer and the serial number, which name the certificate however it is encoded."""
        return issued_as(self.root_kid, self.serial)

    def valid_at(self, now_ms: int) -> bool:
        return self.not_before_ms <= now_ms < self.not_after_ms


def certificates_in(pem: str) -> list[bytes]:
    """Return the DER of each certificate in ``pem``, in order; text around them is ignored.

    Raises:
        CertificateFormatError: more than ``MAX_PEM_BYTES``, or a certificate that is not base64.
    """
    if len(pem) > MAX_PEM_BYTES:
        raise CertificateFormatError("the PEM is too large")
    try:
        return [base64.b64decode(match, validate=False) for match in _CERTIFICATE.findall(pem)]
    except binascii.Error:
        raise CertificateFormatError("a certificate is not base64") from None


def first_certificate_in(pem: str) -> bytes:
    """Return the DER of the first certificate in ``pem``, which is the leaf where there are several.

    Raises:
        CertificateFormatError: as ``certificates_in``, or there is none.
    """
    certificates = certificates_in(pem)
    if not certificates:
        raise CertificateFormatError("there is none in PEM")
    return certificates[0]


def to_pem(ders: Iterable[bytes]) -> str:
    """Return certificates as PEM, and nothing else: what stood around them where they came from is gone."""
    return "".join(map(DER_cert_to_PEM_cert, ders))


def validity_of(der: bytes) -> tuple[int, int]:
    """Return when the certificate ``der`` begins and ends, in milliseconds since the epoch.

    For a certificate of one's own: nothing is verified, and no X.509 library is needed.

    Raises:
        CertificateFormatError: it is no certificate.
    """
    # RFC 5280 section 4.1: in the certificate, in what is signed of it, behind version, serial number,
    # algorithm and issuer.
    signed = _content(_content(der)[1])[1]
    for _ in range(4):
        signed = _content(signed)[2]
    _, validity, _ = _content(signed)
    tag, start, rest = _content(validity)
    end_tag, end, _ = _content(rest)
    return _time_ms(tag, start), _time_ms(end_tag, end)


def issued_as(root_kid: str, serial: int) -> str:
    """Return the name of what the root with the thumbprint ``root_kid`` has issued under ``serial``."""
    return f"{root_kid}/{serial:x}"


def serial_of(der: bytes) -> int:
    """Return the serial number of the certificate ``der``, which was verified.

    Raises:
        CertificateFormatError: it is no certificate.
    """
    return int.from_bytes(_serial(der), "big")


def has_positive_serial(der: bytes) -> bool:
    """Return whether the certificate ``der`` has a serial number as RFC 5280 section 4.1.2.2 wants it.

    Asked before the X.509 library is: it warns of others on standard error, and will not read them one day.
    """
    try:
        serial = _serial(der)
    except CertificateFormatError:
        return False
    return bool(serial.strip(b"\0")) and serial[0] < 0x80  # noqa: PLR2004 - the bit of a sign


def _serial(der: bytes) -> bytes:
    signed = _content(_content(der)[1])[1]
    tag, serial, rest = _content(signed)
    return _content(rest)[1] if tag == _VERSION else serial


def _content(der: bytes) -> tuple[int, bytes, bytes]:
    """Return the tag and the content of the first element of ``der``, and what follows it."""
    if len(der) < 2:  # noqa: PLR2004 - a tag and a length
        raise CertificateFormatError("not a certificate")
    size, start = der[1], 2
    if size & 0x80:
        start += size & 0x7F
        size = int.from_bytes(der[2:start], "big")
    if len(der) < start + size:
        raise CertificateFormatError("not a certificate")
    return der[0], der[start : start + size], der[start + size :]


def _time_ms(tag: int, text: bytes) -> int:
    # Not strptime: it begins the century elsewhere, and loads the tables of all locales into a running node.
    if tag == _UTC_TIME:
        text = (b"19" if text >= _FIRST_OF_1900 else b"20") + text
    elif tag != _GENERALIZED_TIME:
        raise CertificateFormatError("not a certificate")
    found = _TIME.fullmatch(text)
    if found is None:
        raise CertificateFormatError("not a certificate")
    year, month, day, hour, minute, second = map(int, found.groups())
    try:
        return int(datetime(year, month, day, hour, minute, second, tzinfo=UTC).timestamp()) * 1000
    except ValueError:  # there is no such day or time
        raise CertificateFormatError("not a certificate") from None


def kid_of(der: bytes) -> str:
    """Return the thumbprint that names a leaf: SHA-256 of its DER, 64 lower-case hex digits."""
    return sha256(der).hexdigest()


def is_for_key(der: bytes, public_key: bytes) -> bool:
    """Return whether the certificate ``der`` holds the Ed25519 ``public_key`` (32 bytes).

    Compares bytes, which is enough for a certificate of one's own, and needs no X.509 library.
    """
    return _SPKI_ED25519 + public_key in der


def san_uri(tenant: str, node_id: str) -> str:
    """Return the URI in a leaf's subject alternative name."""
    return f"urn:edge-kubelet:tenant:{tenant}:node:{node_id}"
