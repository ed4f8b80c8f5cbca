"""The certificate that the relay's own CA issues to it: shown to its clients, and to the broker.

Must not serve or connect, and must not issue anew without a reason.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from ipaddress import ip_address
from typing import Protocol

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from cryptography.x509.oid import NameOID

from relay.config import TlsFiles
from relay.key_files import load_or_create_key
from schemas.addresses import host_of
from schemas.files import read_state, write_atomic
from schemas.x509_forms import moment

RELAY_NAME = "edge-relay"
"""The common name by which a broker knows the relay. It is no node id."""

_LOCAL = ("localhost", "127.0.0.1", "::1")


class ServerAuthority(Protocol):
    """The part of the CA that vouches for servers."""

    def roots(self) -> list[str]:
        """Return the roots that are trusted now."""
        ...

    def issue_server(self, name: str, hosts: Sequence[str], public_key: bytes) -> str:
        """Return a certificate for ``hosts`` in PEM."""
        ...


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a certificate must be for."""

    name: str
    hosts: Sequence[str]
    public_key: bytes


class OwnCertificate:
    """The certificate and its key in ``files``, for clients of ``public_url`` and of this machine."""

    def __init__(
        self,
        files: TlsFiles,
        ca: ServerAuthority,
        public_url: str,
        now_ms: Callable[[], int],
        random_bytes: Callable[[int], bytes],
    ) -> None:
        self.files = files
        self._ca = ca
        self._hosts = tuple(dict.fromkeys((host_of(public_url), *_LOCAL)))
        self._now_ms = now_ms
        self._random_bytes = random_bytes

    def renew(self) -> bool:
        """Have a certificate issued if there is a reason to; return whether there was.

        Raises:
            StateError: the CA cannot issue it, or the key is damaged.
            OSError: the files cannot be used; the key may be readable by others.
        """
        key = load_or_create_key(self.files.key, self._random_bytes)
        wanted = Wanted(RELAY_NAME, self._hosts, bytes(key.verify_key))
        try:
            held = read_state(self.files.certificate).decode("utf-8", "replace")
        except FileNotFoundError:
            held = ""
        if reason_to_renew(held, wanted, self._ca.roots(), self._now_ms()) is None:
            return False
        issued = self._ca.issue_server(wanted.name, wanted.hosts, wanted.public_key)
        write_atomic(self.files.certificate, issued)
        return True


def reason_to_renew(held_pem: str, wanted: Wanted, roots: Sequence[str], now_ms: int) -> str | None:
    """Return why the certificate ``held_pem`` will not do any longer, in a word; None if it will."""
    try:
        held = x509.load_pem_x509_certificate(held_pem.encode("utf-8"))
        names = held.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        public_key = held.public_key().public_bytes(Encoding.Raw, PublicFormat.Raw)
    except (ValueError, x509.ExtensionNotFound):
        return "none"
    common_names = [name.value for name in held.subject.get_attributes_for_oid(NameOID.COMMON_NAME)]
    if public_key != wanted.public_key or common_names != [wanted.name]:
        return "another"
    hosts = {str(name.value) for name in names if isinstance(name, x509.DNSName | x509.IPAddress)}
    if hosts != {_host(host) for host in wanted.hosts}:
        return "hosts"
    life = held.not_valid_after_utc - held.not_valid_before_utc
    if not held.not_valid_before_utc <= moment(now_ms) < held.not_valid_after_utc - life / 3:
        return "age"
    return None if any(_issued_by(held, root) for root in roots) else "root"


def _host(host: str) -> str:
    try:
        return str(ip_address(host))
    except ValueError:
        return host


def _issued_by(held: x509.Certificate, root_pem: str) -> bool:
    try:
        held.verify_directly_issued_by(x509.load_pem_x509_certificate(root_pem.encode("utf-8")))
    except (ValueError, TypeError, InvalidSignature):
        return False
    return True
