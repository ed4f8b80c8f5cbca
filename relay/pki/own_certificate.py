"""The certificates that the relay's own CA issues to the relay itself, and to the broker that it runs.

It serves with one of the root of servers, P-256; to the broker it shows one of the root of nodes, Ed25519, as
all clients of the broker do. Both are valid for 90 days, since only their end keeps a stolen key from being
believed, and are issued again when two thirds of that have passed.
Must not serve or connect, and must not issue anew without a reason.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from ipaddress import ip_address
from typing import Protocol

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, EllipticCurvePublicKey
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_pem_public_key
from cryptography.x509.oid import NameOID

from relay.pki.errors import AuthorityStateError, CertificateRefusedError
from relay.pki.server_keys import load_or_create_server_key
from relay.settings.config import TlsFiles
from relay.state.key_files import load_or_create_key
from schemas.addresses import host_of
from schemas.certificates import moment
from schemas.files import read_state, write_atomic

RELAY_NAME = "edge-relay"
"""The common name by which a broker knows the relay. It is no node id."""
RELAY_URI = "urn:edge-kubelet:relay"
"""The other name of the relay's certificate for the broker: no node's has this form."""
BROKER_NAME = "edge-broker"
"""The common name of the broker that the relay runs itself; it has no rights at a broker."""

_LOCAL = ("localhost", "127.0.0.1", "::1")
_DAYS = 90
_UNREADABLE = (
    ValueError,
    UnsupportedAlgorithm,
    x509.DuplicateExtension,
    x509.ExtensionNotFound,
    x509.InvalidVersion,
)
"""What the library raises for a certificate that is damaged, by where the damage is."""


class RelayUse(StrEnum):
    """What a relay uses a certificate for, as ``cluster.ca_request`` names it."""

    SERVE = "serve"
    BROKER = "broker"


class OwnServerAuthority(Protocol):
    """The part of the CA that issues for servers."""

    def roots(self) -> list[str]:
        """Return the roots of servers that are trusted now."""
        ...

    def issue(
        self, name: str, hosts: Sequence[str], public_key: EllipticCurvePublicKey, valid_days: int
    ) -> str:
        """Return a server's certificate in PEM."""
        ...


class OwnAuthority(Protocol):
    """The part of the CA that issues for the broker's clients, nodes among them."""

    @property
    def servers(self) -> OwnServerAuthority:
        """The part that issues for servers."""
        ...

    def roots(self) -> list[str]:
        """Return the roots of nodes that are trusted now."""
        ...

    def issue_client(self, name: str, uri: str, public_key: bytes, valid_days: int) -> str:
        """Return a client's certificate in PEM."""
        ...


@dataclass(frozen=True, slots=True)
class WantedCertificate:
    """What a certificate must be for: a common name, all other names, and a key."""

    name: str
    others: frozenset[str]
    public_key: EllipticCurvePublicKey | Ed25519PublicKey


class ServedCertificate:
    """What the server ``name`` serves with, and its key, in ``files``: for ``hosts`` and for this machine."""

    use = RelayUse.SERVE

    def __init__(  # noqa: PLR0913, PLR0917 - what comes in from outside
        self,
        files: TlsFiles,
        ca: OwnServerAuthority,
        name: str,
        hosts: Sequence[str],
        now_ms: Callable[[], int],
        random_bytes: Callable[[int], bytes],
    ) -> None:
        self.files = files
        self._ca = ca
        self._name = name
        self._hosts = tuple(dict.fromkeys((*hosts, *_LOCAL)))
        self._now_ms = now_ms
        self._random_bytes = random_bytes

    def renew(self) -> bool:
        """Have a certificate issued if there is a reason to; return whether there was.

        Raises:
            StateError: the CA cannot issue it, or the key is damaged.
            OSError: the files cannot be used; the key may be readable by others.
        """
        if self.due() is None:
            return False
        key = self._wanted_key()
        write_atomic(self.files.certificate, self._ca.issue(self._name, self._hosts, key, _DAYS))
        return True

    def due(self) -> WantedCertificate | None:
        """Return what is to be issued; None if there is no reason to.

        Raises:
            StateError, OSError: as ``renew``.
        """
        wanted = WantedCertificate(self._name, frozenset(map(_host, self._hosts)), self._wanted_key())
        return _if_due(self.files, wanted, self._ca.roots(), self._now_ms())

    def install(self, wanted: WantedCertificate, certificate: str) -> None:
        """Use the ``certificate`` that another relay's CA has issued.

        Raises:
            AuthorityStateError: it is not what is ``wanted``; the one in use stays.
            OSError: it cannot be written.
        """
        _install(self.files, wanted, certificate, self._ca.roots(), self._now_ms())

    def _wanted_key(self) -> EllipticCurvePublicKey:
        return load_or_create_server_key(self.files.key, self._random_bytes).public_key()


class BrokerCertificate:
    """What the relay shows to the broker, and its key, in ``files``."""

    use = RelayUse.BROKER

    def __init__(
        self,
        files: TlsFiles,
        ca: OwnAuthority,
        now_ms: Callable[[], int],
        random_bytes: Callable[[int], bytes],
    ) -> None:
        self.files = files
        self._ca = ca
        self._now_ms = now_ms
        self._random_bytes = random_bytes

    def renew(self) -> bool:
        """Have a certificate issued if there is a reason to; return whether there was.

        Raises:
            StateError, OSError: as for what is served.
        """
        if self.due() is None:
            return False
        raw = self._wanted_key().public_bytes_raw()
        write_atomic(self.files.certificate, self._ca.issue_client(RELAY_NAME, RELAY_URI, raw, _DAYS))
        return True

    def due(self) -> WantedCertificate | None:
        """Return what is to be issued, as for what is served."""
        wanted = WantedCertificate(RELAY_NAME, frozenset({RELAY_URI}), self._wanted_key())
        return _if_due(self.files, wanted, self._ca.roots(), self._now_ms())

    def install(self, wanted: WantedCertificate, certificate: str) -> None:
        """Use a certificate that another relay's CA has issued, as for what is served."""
        _install(self.files, wanted, certificate, self._ca.roots(), self._now_ms())

    def _wanted_key(self) -> Ed25519PublicKey:
        raw = bytes(load_or_create_key(self.files.key, self._random_bytes).verify_key)
        return Ed25519PublicKey.from_public_bytes(raw)


def issue_for_another_relay(ca: OwnAuthority, use: str, public_key_pem: str, public_url: str) -> str:
    """Return a certificate for a relay of the same fleet that has no CA key, in PEM.

    It is for the names that this relay has itself: the other relay chooses nothing but its key.

    Raises:
        CertificateRefusedError: the key is none for that use.
        AuthorityStateError: the CA cannot issue it.
    """
    try:
        key = load_pem_public_key(public_key_pem.encode("utf-8"))
    except (ValueError, UnsupportedAlgorithm):
        key = None
    if use == RelayUse.SERVE and isinstance(key, EllipticCurvePublicKey) and isinstance(key.curve, SECP256R1):
        return ca.servers.issue(RELAY_NAME, relay_hosts(public_url), key, _DAYS)
    if use == RelayUse.BROKER and isinstance(key, Ed25519PublicKey):
        return ca.issue_client(RELAY_NAME, RELAY_URI, key.public_bytes_raw(), _DAYS)
    raise CertificateRefusedError(f"a relay has sent no key that it could use to {use}")


def public_key_pem(key: EllipticCurvePublicKey | Ed25519PublicKey) -> str:
    """Return ``key`` as SubjectPublicKeyInfo in PEM."""
    return key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo).decode("ascii")


def relay_hosts(public_url: str) -> tuple[str, ...]:
    """Return the hosts that a relay of ``public_url`` serves under."""
    return tuple(dict.fromkeys((host_of(public_url), *_LOCAL)))


def _if_due(
    files: TlsFiles, wanted: WantedCertificate, roots: Sequence[str], now_ms: int
) -> WantedCertificate | None:
    return None if reason_to_renew(_held(files), wanted, roots, now_ms) is None else wanted


def _install(
    files: TlsFiles, wanted: WantedCertificate, certificate: str, roots: Sequence[str], now_ms: int
) -> None:
    reason = reason_to_renew(certificate, wanted, roots, now_ms)
    if reason is not None:
        raise AuthorityStateError(f"the relay with the CA's key has issued another certificate: {reason}")
    write_atomic(files.certificate, certificate)


def _held(files: TlsFiles) -> str:
    try:
        return read_state(files.certificate).decode("utf-8", "replace")
    except FileNotFoundError:
        return ""


def reason_to_renew(
    held_pem: str, wanted: WantedCertificate, roots: Sequence[str], now_ms: int
) -> str | None:
    """Return why the certificate ``held_pem`` will not do any longer, in a word; None if it will."""
    try:
        held = x509.load_pem_x509_certificate(held_pem.encode("utf-8"))
        names = held.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        public_key = held.public_key()
        # The library reads each part when it is asked for it.
        common_names = [name.value for name in held.subject.get_attributes_for_oid(NameOID.COMMON_NAME)]
        begin, end = held.not_valid_before_utc, held.not_valid_after_utc
    except _UNREADABLE:
        return "none"
    if public_key != wanted.public_key or common_names != [wanted.name]:
        return "another"
    if {str(name.value) for name in names} != wanted.others:
        return "names"
    if not begin <= moment(now_ms) < end - (end - begin) / 3:
        return "age"
    return None if any(issued_by(held_pem, root) for root in roots) else "root"


def _host(host: str) -> str:
    try:
        return str(ip_address(host))
    except ValueError:
        return host


def issued_by(held_pem: str, root_pem: str) -> bool:
    """Return whether the certificate ``held_pem`` was issued by the root ``root_pem``."""
    try:
        held = x509.load_pem_x509_certificate(held_pem.encode("utf-8"))
        held.verify_directly_issued_by(x509.load_pem_x509_certificate(root_pem.encode("utf-8")))
    except (*_UNREADABLE, TypeError, InvalidSignature):
        return False
    return True
