"""Signs what the CA issues: roots, certificates of nodes, clients and servers, CRLs.

``Issuing`` returns with each certificate its record for the ledger. Must not decide whether to issue, and
must not read or write files.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from hashlib import sha1
from ipaddress import ip_address
from typing import Generic, TypeVar

from attrs import define
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey, EllipticCurvePublicKey
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from cryptography.x509.oid import ExtendedKeyUsageOID
from nacl.signing import SigningKey

from relay.pki.errors import (
    AuthorityOptionError,
    AuthorityStateError,
    CertificateRefusedError,
    MalformedNameError,
)
from relay.state.certificates import IssuedLeaf, IssuedServer
from schemas.addresses import is_host
from schemas.certificates import (
    CLOCK_SKEW,
    UNENROLLED_TENANT,
    IdentityError,
    IdentityReason,
    builder_for,
    client_builder,
    end_of,
    key_usage,
    moment,
    name_of,
    pem_of,
    private,
    read_csr,
)
from schemas.identity import TENANT_PATTERN, first_certificate_in, kid_of, san_uri
from schemas.keys import is_sound_public_key
from schemas.projection import is_node_id
from schemas.text import quoted
from schemas.times import SystemClock, is_credible

_ROOT_DAYS = 3650
_LEAF_DAYS = 90
_SERIAL_BYTES = 16
_SEED_BYTES = 32
_KEY_ID_DIGITS = 8
_MALFORMED = frozenset({IdentityReason.NOT_A_TENANT, IdentityReason.NOT_A_HOST, IdentityReason.NOT_A_NAME})
KeyT = TypeVar("KeyT")
_SERVERS_ONLY = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH])
_MAX_COMMON_NAME = 64  # RFC 5280, ub-common-name


@dataclass(frozen=True, slots=True)
class Signer(Generic[KeyT]):
    """A root and its key: Ed25519 for nodes and the broker's clients, P-256 for servers."""

    pem: str
    key: KeyT = field(repr=False)

    @property
    def kid(self) -> str:
        return _kid(self.pem)


@define(eq=False, repr=False)
class Issuing:
    """Signs. Time and randomness are arguments."""

    _now_ms: SystemClock
    _random_bytes: Callable[[int], bytes]

    def root(self) -> Signer[SigningKey]:
        """Return a new root of nodes.

        Raises:
            AuthorityStateError: the clock is wrong: by a right one the root would have ended, or soon would.
        """
        now = self._credible_now_ms()
        key = SigningKey(self._random_bytes(_SEED_BYTES))
        name = f"edge-kubelet root {_key_id(bytes(key.verify_key))}"
        return Signer(make_root(key, name, now, _ROOT_DAYS, self._serial()), key)

    def server_root(
        self, key: EllipticCurvePrivateKey, name: str | None = None
    ) -> Signer[EllipticCurvePrivateKey]:
        """Return a new root of servers, by default under a name of its own.

        Raises:
            AuthorityStateError: as ``root``.
        """
        now = self._credible_now_ms()
        if name is None:
            point = key.public_key().public_bytes(Encoding.X962, PublicFormat.UncompressedPoint)
            name = f"edge-kubelet servers {_key_id(point)}"
        return Signer(make_server_root(key, name, now, _ROOT_DAYS, self._serial()), key)

    def cross(self, signer: Signer[SigningKey], server_root_pem: str) -> str:
        """Return the certificate of a root of servers by a root of nodes, in PEM."""
        return cross_certify(signer.pem, signer.key, server_root_pem, self._serial())

    def _credible_now_ms(self) -> int:
        if not is_credible(self._now_ms()):
            raise AuthorityStateError("this machine's clock reads a time before 2023-11-14: set the clock")
        return self._now_ms()

    def leaf(
        self,
        signer: Signer[SigningKey],
        node_id: str,
        tenant: str,
        public_key: bytes,
        join_id: str | None = None,
    ) -> tuple[IssuedLeaf, str]:
        """Return a node's leaf: the record of it, and its PEM.

        Raises:
            AuthorityOptionError: tenant, node id or key are not of their form.
            AuthorityStateError: the root is damaged, or ends within a day.
        """
        now, serial = self._now_ms(), self._serial()
        with _explain_errors(signer, f"tenant {quoted(tenant)}"):
            pem = issue_leaf(
                signer.pem,
                signer.key,
                node_id=node_id,
                tenant=tenant,
                public_key=public_key,
                now_ms=now,
                valid_days=_LEAF_DAYS,
                serial=serial,
            )
        return IssuedLeaf(node_id, tenant, _kid(pem), public_key, serial, end_of(pem), now, join_id), pem

    def client(
        self, signer: Signer[SigningKey], name: str, uri: str, public_key: bytes, valid_days: int
    ) -> tuple[IssuedServer, str]:
        """Return the certificate of a client of the broker that is no node: the record of it, and its PEM.

        Raises:
            AuthorityOptionError: name or key are not of their form, or the name is a node's.
            AuthorityStateError: the root is damaged, or ends within a day.
        """
        now, serial = self._now_ms(), self._serial()
        with _explain_errors(signer, f"client {quoted(name)}"):
            pem = issue_client(
                signer.pem,
                signer.key,
                name=_no_node(name),
                uri=uri,
                public_key=public_key,
                now_ms=now,
                valid_days=valid_days,
                serial=serial,
            )
        return IssuedServer(name, _kid(pem), serial, end_of(pem), now), pem

    def server(
        self,
        signer: Signer[EllipticCurvePrivateKey],
        name: str,
        hosts: Sequence[str],
        public_key: EllipticCurvePublicKey,
        valid_days: int,
    ) -> tuple[IssuedServer, str]:
        """Return a broker's or relay's certificate: the record of it, and its PEM.

        Raises:
            AuthorityOptionError: name or hosts are not of their form, or the name is a node's.
            AuthorityStateError: the root is damaged, or ends within a day.
        """
        now, serial = self._now_ms(), self._serial()
        with _explain_errors(signer, f"server {quoted(name)}"):
            pem = issue_server(
                signer.pem,
                signer.key,
                name=_no_node(name),
                hosts=hosts,
                public_key=public_key,
                now_ms=now,
                valid_days=valid_days,
                serial=serial,
            )
        return IssuedServer(name, _kid(pem), serial, end_of(pem), now), pem

    def _serial(self) -> int:
        # RFC 5280 wants a positive integer of at most 20 octets.
        return int.from_bytes(self._random_bytes(_SERIAL_BYTES), "big") | 1


def read_request(csr_pem: str) -> tuple[str, bytes]:
    """Return the node id and the public key of a certificate request.

    Raises:
        CertificateRefusedError: it proves nothing.
    """
    try:
        return read_csr(csr_pem)
    except IdentityError as error:
        raise CertificateRefusedError(f"the certificate request is not accepted: {error.reason}") from None


def _no_node(name: str) -> str:
    if is_node_id(name):
        # A broker identifies clients by the common name: it would take the holder for that node.
        raise AuthorityOptionError(f"{name} is the name of a node: nothing else can have it")
    return name


def _key_id(public_key: bytes) -> str:
    """Return a name for the key: roots must differ in their names too, by which issuers are found."""
    return sha1(public_key, usedforsecurity=False).hexdigest()[:_KEY_ID_DIGITS]


@contextmanager
def _explain_errors(signer: Signer[KeyT], subject: str) -> Iterator[None]:
    try:
        yield
    except IdentityError as error:
        if error.reason is IdentityReason.ROOT_TOO_OLD:
            raise AuthorityStateError("the root ends within a day: run `relay ca rotate-root`") from None
        kind = MalformedNameError if error.reason in _MALFORMED else AuthorityOptionError
        raise kind(f"not issued for {subject}: {error.reason}") from None
    except ValueError:
        # Without the library's text, which can show what was read.
        raise AuthorityStateError(f"the root {signer.kid} is damaged") from None


def _kid(pem: str) -> str:
    return kid_of(first_certificate_in(pem))


def make_root(key: SigningKey, name: str, now_ms: int, valid_days: int, serial: int) -> str:
    """Return the self-signed certificate of a root of nodes, in PEM."""
    return pem_of(
        _root_builder(private(key).public_key(), name, now_ms, valid_days, serial).sign(private(key), None)
    )


def make_server_root(
    key: EllipticCurvePrivateKey, name: str, now_ms: int, valid_days: int, serial: int
) -> str:
    """Return the self-signed certificate of a root of servers, in PEM. It can issue for nothing else."""
    builder = _root_builder(key.public_key(), name, now_ms, valid_days, serial)
    return pem_of(builder.add_extension(_SERVERS_ONLY, critical=False).sign(key, SHA256()))


def cross_certify(root_pem: str, root_key: SigningKey, server_root_pem: str, serial: int) -> str:
    """Return the certificate of a root of servers that a root of nodes has signed, in PEM.

    For a verifier that knows the root of nodes alone. That root allows no CA below it, so both must have one
    name: a self-issued certificate does not count in the length of a path (RFC 5280 section 4.2.1.9).
    """
    root = x509.load_pem_x509_certificate(root_pem.encode("ascii"))
    server_root = x509.load_pem_x509_certificate(server_root_pem.encode("ascii"))
    builder = (
        x509.CertificateBuilder()
        .subject_name(server_root.subject)
        .public_key(server_root.public_key())
        .not_valid_before(server_root.not_valid_before_utc)
        .not_valid_after(min(server_root.not_valid_after_utc, root.not_valid_after_utc))
    )
    for extension in server_root.extensions:
        builder = builder.add_extension(extension.value, extension.critical)
    return _sign(builder, root, root_key, serial)


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
    builder = client_builder(public_key, node_id, san_uri(tenant, node_id), now_ms, days)
    return _sign(builder, root, root_key, serial)


def issue_client(  # noqa: PLR0913 - a certificate has this many facts
    root_pem: str,
    root_key: SigningKey,
    *,
    name: str,
    uri: str,
    public_key: bytes,
    now_ms: int,
    valid_days: int,
    serial: int,
) -> str:
    """Return the certificate in PEM of a client of the broker that is no node.

    The broker identifies it by its common name ``name``. Its only other name is ``uri``, which is not of the
    form of a node's, so no relay takes it for a node.

    Raises:
        IdentityError: the key is of low order, the name is not valid, or the root ends within a day.
    """
    if not is_sound_public_key(public_key):
        raise IdentityError(IdentityReason.LOW_ORDER_KEY)
    _check_common_name(name)
    root, days = _root_for(root_pem, now_ms, valid_days)
    return _sign(client_builder(public_key, name, uri, now_ms, days), root, root_key, serial)


def issue_server(  # noqa: PLR0913 - a certificate has this many facts
    root_pem: str,
    root_key: EllipticCurvePrivateKey | SigningKey,
    *,
    name: str,
    hosts: Sequence[str],
    public_key: EllipticCurvePublicKey,
    now_ms: int,
    valid_days: int,
    serial: int,
    is_client_too: bool = False,
) -> str:
    """Return a certificate in PEM for a server that is reached under ``hosts``: names and addresses.

    ``is_client_too``: it connects to others of its kind, which demand a certificate.

    Raises:
        IdentityError: name or host is not valid, there is no host, or the root ends within a day.
    """
    if not hosts:
        raise IdentityError(IdentityReason.NOT_A_HOST)
    _check_common_name(name)
    root, days = _root_for(root_pem, now_ms, valid_days)
    names = [_host_name(host) for host in hosts]
    usages = [ExtendedKeyUsageOID.SERVER_AUTH, *([ExtendedKeyUsageOID.CLIENT_AUTH] if is_client_too else [])]
    return _sign(builder_for(public_key, name, names, usages, now_ms, days), root, root_key, serial)


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


def _root_builder(
    public_key: Ed25519PublicKey | EllipticCurvePublicKey,
    name: str,
    now_ms: int,
    valid_days: int,
    serial: int,
) -> x509.CertificateBuilder:
    """Return the unsigned form of a self-signed root."""
    subject, start = name_of(name), moment(now_ms)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(public_key)
        .serial_number(serial)
        .not_valid_before(start - CLOCK_SKEW)
        .not_valid_after(start + timedelta(days=valid_days))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(key_usage(ca=True), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public_key), critical=False)
    )


def _sign(
    builder: x509.CertificateBuilder,
    root: x509.Certificate,
    root_key: SigningKey | EllipticCurvePrivateKey,
    serial: int,
) -> str:
    builder = builder.issuer_name(root.subject).serial_number(serial)
    builder = builder.add_extension(_authority_of(root), critical=False)
    if isinstance(root_key, SigningKey):
        return pem_of(builder.sign(private(root_key), None))
    return pem_of(builder.sign(root_key, SHA256()))


def _authority_of(root: x509.Certificate) -> x509.AuthorityKeyIdentifier:
    # RFC 5280 section 4.2.1.1; without it strict verifiers refuse, and two roots could be mixed up.
    key = root.public_key()
    if not isinstance(key, Ed25519PublicKey | EllipticCurvePublicKey):
        raise IdentityError(IdentityReason.BAD_CERTIFICATE)
    return x509.AuthorityKeyIdentifier.from_issuer_public_key(key)


def _check_common_name(name: str) -> None:
    _host_name(name)
    if len(name) > _MAX_COMMON_NAME:
        raise IdentityError(IdentityReason.NOT_A_NAME)


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
