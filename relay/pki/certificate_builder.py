"""Builds what the certificate authority issues: roots, leaves, server certificates, revocation lists.

Must not decide whether to issue, and must not read files, clocks or randomness.
"""

import re
from collections.abc import Iterable, Sequence
from datetime import timedelta
from ipaddress import ip_address

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509.oid import ExtendedKeyUsageOID
from nacl.signing import SigningKey

from schemas.addresses import is_host
from schemas.certificates import UNENROLLED_TENANT, IdentityError, IdentityReason
from schemas.identity import TENANT_PATTERN, san_uri
from schemas.keys import is_sound_public_key
from schemas.projection import is_node_id
from schemas.x509_forms import (
    CLOCK_SKEW,
    builder_for,
    key_usage,
    leaf_builder,
    moment,
    name_of,
    pem_of,
    private,
)

_MAX_COMMON_NAME = 64  # RFC 5280, ub-common-name


def make_root(key: SigningKey, name: str, now_ms: int, valid_days: int, serial: int) -> str:
    """Return a self-signed root certificate in PEM."""
    subject = name_of(name)
    public = private(key).public_key()
    start = moment(now_ms)
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(public)
        .serial_number(serial)
        .not_valid_before(start - CLOCK_SKEW)
        .not_valid_after(start + timedelta(days=valid_days))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(key_usage(ca=True), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
    )
    return pem_of(builder.sign(private(key), None))


def issue_leaf(  # noqa: PLR0913 - a certificate has this many facts
    root_pem: str,
    root_key: SigningKey,
    *,
    node_id: str,
    tenant: str,
    public_key: bytes,
    now_ms: int,
    valid_days: int,
    serial: int,
) -> str:
    """Return a leaf in PEM for ``public_key`` (32 raw bytes), issued by the root.

    Raises:
        IdentityError: the key is of low order, tenant or node id are not of their form, or the root ends
            within a day.
    """
    if not is_sound_public_key(public_key):
        raise IdentityError(IdentityReason.LOW_ORDER_KEY)
    if not is_node_id(node_id):
        raise IdentityError(IdentityReason.NOT_A_NODE_ID)
    if not re.fullmatch(TENANT_PATTERN, tenant) or tenant == UNENROLLED_TENANT:
        raise IdentityError(IdentityReason.NOT_A_TENANT)
    root, days = _root_for(root_pem, now_ms, valid_days)
    builder = leaf_builder(public_key, node_id, san_uri(tenant, node_id), now_ms, days)
    return _signed(builder, root, root_key, serial)


def issue_server(  # noqa: PLR0913 - a certificate has this many facts
    root_pem: str,
    root_key: SigningKey,
    *,
    name: str,
    hosts: Sequence[str],
    public_key: bytes,
    now_ms: int,
    valid_days: int,
    serial: int,
) -> str:
    """Return a certificate in PEM for a server that is reached under ``hosts``: names and addresses.

    It is a client certificate too: the relay shows it to the broker, which identifies it by its common name
    ``name``. No node can have it: a leaf's only name is the URN of the node.

    Raises:
        IdentityError: the key is of low order, name or host is none, there is no host, or the root ends
            within a day.
    """
    if not is_sound_public_key(public_key):
        raise IdentityError(IdentityReason.LOW_ORDER_KEY)
    if not hosts:
        raise IdentityError(IdentityReason.NOT_A_HOST)
    _host_name(name)
    if len(name) > _MAX_COMMON_NAME:
        raise IdentityError(IdentityReason.NOT_A_NAME)
    root, days = _root_for(root_pem, now_ms, valid_days)
    usages = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
    names = [_host_name(host) for host in hosts]
    return _signed(builder_for(public_key, name, names, usages, now_ms, days), root, root_key, serial)


def make_crl(root_pem: str, root_key: SigningKey, serials: Iterable[int], now_ms: int, number: int) -> str:
    """Return the list of revoked ``serials`` in PEM, signed by the root that issued them.

    It is valid for as long as the root: a broker refuses every client once its list has expired, and each
    revocation writes a new list.
    """
    root = x509.load_pem_x509_certificate(root_pem.encode("ascii"))
    builder = (
        x509.CertificateRevocationListBuilder()
        .issuer_name(root.subject)
        .last_update(moment(now_ms) - CLOCK_SKEW)
        .next_update(root.not_valid_after_utc)
        .add_extension(x509.CRLNumber(number), critical=False)
        .add_extension(_authority_of(root), critical=False)
    )
    for serial in serials:
        revoked = x509.RevokedCertificateBuilder().serial_number(serial).revocation_date(moment(now_ms))
        builder = builder.add_revoked_certificate(revoked.build())
    return builder.sign(private(root_key), None).public_bytes(Encoding.PEM).decode("ascii")


def _root_for(root_pem: str, now_ms: int, valid_days: int) -> tuple[x509.Certificate, int]:
    """Return the root, and how many of ``valid_days`` are within its life."""
    root = x509.load_pem_x509_certificate(root_pem.encode("ascii"))
    # A certificate that outlived its root would be rejected from then on without a diagnosis.
    days_left = (root.not_valid_after_utc - moment(now_ms)).days
    if days_left < 1:
        raise IdentityError(IdentityReason.ROOT_TOO_OLD)
    return root, min(valid_days, days_left)


def _signed(
    builder: x509.CertificateBuilder, root: x509.Certificate, root_key: SigningKey, serial: int
) -> str:
    builder = builder.issuer_name(root.subject).serial_number(serial)
    builder = builder.add_extension(_authority_of(root), critical=False)
    return pem_of(builder.sign(private(root_key), None))


def _authority_of(root: x509.Certificate) -> x509.AuthorityKeyIdentifier:
    # RFC 5280 section 4.2.1.1; without it strict verifiers refuse, and two roots could be mixed up.
    key = root.public_key()
    if not isinstance(key, Ed25519PublicKey):
        raise IdentityError(IdentityReason.NOT_ED25519)
    return x509.AuthorityKeyIdentifier.from_issuer_public_key(key)


def _host_name(host: str) -> x509.GeneralName:
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    try:
        address = ip_address(bare)
    except ValueError:
        address = None
    if address is not None and "%" not in bare:  # a zone is meaningful on one machine alone
        return x509.IPAddress(address)
    if not is_host(host):
        raise IdentityError(IdentityReason.NOT_A_HOST)
    return x509.DNSName(host)
