"""The certificates that the relay's own CA issues to the relay itself, and to the broker that it runs.

It serves with one of the root of servers, P-256; to the broker it shows one of the root of nodes, Ed25519, as
all clients of the broker do. Both are valid for 90 days, since only their end keeps a stolen key from being
believed, and are issued again when two thirds of that have passed.
Must not serve or connect, and must not issue anew without a reason.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from ipaddress import ip_address
from typing import Protocol

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePublicKey
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.x509.oid import NameOID

from relay.config import TlsFiles
from relay.key_files import load_or_create_key
from relay.pki.server_keys import load_or_create_server_key
from schemas.files import read_state, write_atomic
from schemas.x509_forms import moment

RELAY_NAME = "edge-relay"
"""The common name by which a broker knows the relay. It is no node id."""
RELAY_URI = "urn:edge-kubelet:relay"
"""The other name of the relay's certificate for the broker: no node's has this form."""
BROKER_NAME = "edge-broker"
"""The common name of the broker that the relay runs itself; it has no rights at a broker."""

_LOCAL = ("localhost", "127.0.0.1", "::1")
_DAYS = 90


class OwnServerAuthority(Protocol):
    """The part of the CA that vouches for servers."""

    def roots(self) -> list[str]:
        """Return the roots of servers that are trusted now."""
        ...

    def issue(
        self, name: str, hosts: Sequence[str], public_key: EllipticCurvePublicKey, valid_days: int
    ) -> str:
        """Return a server's certificate in PEM."""
        ...


class OwnAuthority(Protocol):
    """The part of the CA that vouches for the broker's clients, nodes among them."""

    @property
    def servers(self) -> OwnServerAuthority:
        """The part that vouches for servers."""
        ...

    def roots(self) -> list[str]:
        """Return the roots of nodes that are trusted now."""
        ...

    def issue_client(self, name: str, uri: str, public_key: bytes, valid_days: int) -> str:
        """Return a client's certificate in PEM."""
        ...


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a certificate must be for: a common name, all other names, and a key."""

    name: str
    others: frozenset[str]
    public_key: EllipticCurvePublicKey | Ed25519PublicKey


class ServedCertificate:
    """What the server ``name`` serves with, and its key, in ``files``: for ``hosts`` and for this machine."""

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
        key = load_or_create_server_key(self.files.key, self._random_bytes).public_key()
        wanted = Wanted(self._name, frozenset(map(_host, self._hosts)), key)
        if reason_to_renew(_held(self.files), wanted, self._ca.roots(), self._now_ms()) is None:
            return False
        write_atomic(self.files.certificate, self._ca.issue(self._name, self._hosts, key, _DAYS))
        return True


class BrokerCertificate:
    """What the relay shows to the broker, and its key, in ``files``."""

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
        raw = bytes(load_or_create_key(self.files.key, self._random_bytes).verify_key)
        wanted = Wanted(RELAY_NAME, frozenset({RELAY_URI}), Ed25519PublicKey.from_public_bytes(raw))
        if reason_to_renew(_held(self.files), wanted, self._ca.roots(), self._now_ms()) is None:
            return False
        write_atomic(self.files.certificate, self._ca.issue_client(RELAY_NAME, RELAY_URI, raw, _DAYS))
        return True


def _held(files: TlsFiles) -> str:
    try:
        return read_state(files.certificate).decode("utf-8", "replace")
    except FileNotFoundError:
        return ""


def reason_to_renew(held_pem: str, wanted: Wanted, roots: Sequence[str], now_ms: int) -> str | None:
    """Return why the certificate ``held_pem`` will not do any longer, in a word; None if it will."""
    try:
        held = x509.load_pem_x509_certificate(held_pem.encode("utf-8"))
        names = held.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        public_key = held.public_key()
    except (ValueError, x509.ExtensionNotFound):
        return "none"
    common_names = [name.value for name in held.subject.get_attributes_for_oid(NameOID.COMMON_NAME)]
    if public_key != wanted.public_key or common_names != [wanted.name]:
        return "another"
    if {str(name.value) for name in names} != wanted.others:
        return "names"
    life = held.not_valid_after_utc - held.not_valid_before_utc
    if not held.not_valid_before_utc <= moment(now_ms) < held.not_valid_after_utc - life / 3:
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
    except (ValueError, TypeError, InvalidSignature):
        return False
    return True
