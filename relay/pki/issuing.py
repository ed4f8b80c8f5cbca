"""Signs what the CA issues, and returns the record of it for the ledger.

Must not decide whether to issue, and must not read or write files.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import sha1

from nacl.signing import SigningKey

from relay.pki.certificate_builder import issue_leaf, issue_server, make_root
from relay.pki.errors import AuthorityOptionError, AuthorityStateError, CertificateRefusedError
from relay.pki.records import IssuedLeaf, IssuedServer
from schemas.certificates import IdentityError, IdentityReason, end_of, read_csr
from schemas.identity import certificates_in, kid_of
from schemas.manifest import FIRST_CREDIBLE_MS
from schemas.projection import is_node_id
from schemas.text import printable

_ROOT_DAYS = 3650
_LEAF_DAYS = 90
_SERVER_DAYS = 397
_SERIAL_BYTES = 16
_SEED_BYTES = 32
_KEY_ID_DIGITS = 8


@dataclass(frozen=True, slots=True)
class Signer:
    """A root and its key."""

    pem: str
    key: SigningKey = field(repr=False)

    @property
    def kid(self) -> str:
        """The thumbprint of the root."""
        return _kid(self.pem)


class Issuing:
    """Signs. Time and randomness are arguments."""

    def __init__(self, now_ms: Callable[[], int], random_bytes: Callable[[int], bytes]) -> None:
        self._now_ms = now_ms
        self._random_bytes = random_bytes

    def root(self) -> Signer:
        """Return a new root.

        Raises:
            AuthorityStateError: the clock is wrong: by a right one the root would have ended, or soon would.
        """
        if self._now_ms() < FIRST_CREDIBLE_MS:
            raise AuthorityStateError("this machine's clock reads a time before 2023-11-14: set the clock")
        key = SigningKey(self._random_bytes(_SEED_BYTES))
        # The key's identifier, as certificates name their issuer: two roots must differ in their names too.
        key_id = sha1(bytes(key.verify_key), usedforsecurity=False).hexdigest()[:_KEY_ID_DIGITS]
        name = f"edge-kubelet root {key_id}"
        return Signer(make_root(key, name, self._now_ms(), _ROOT_DAYS, self._serial()), key)

    def leaf(
        self, signer: Signer, node_id: str, tenant: str, public_key: bytes, join_id: str | None = None
    ) -> tuple[IssuedLeaf, str]:
        """Return a node's leaf: the record of it, and its PEM.

        Raises:
            AuthorityOptionError: tenant, node id or key are not of their form.
            AuthorityStateError: the root is damaged, or ends within a day.
        """
        now, serial = self._now_ms(), self._serial()
        with _explained(signer, f"tenant {printable(tenant)!r}"):
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

    def server(
        self, signer: Signer, name: str, hosts: Sequence[str], public_key: bytes
    ) -> tuple[IssuedServer, str]:
        """Return a broker's or relay's certificate: the record of it, and its PEM.

        Raises:
            AuthorityOptionError: name, hosts or key are not of their form, or the name is a node's.
            AuthorityStateError: the root is damaged, or ends within a day.
        """
        if is_node_id(name):
            # A broker identifies clients by the common name: it would take the server for that node.
            raise AuthorityOptionError(f"{name} is the name of a node: no server can have it")
        now, serial = self._now_ms(), self._serial()
        with _explained(signer, f"server {printable(name)!r}"):
            pem = issue_server(
                signer.pem,
                signer.key,
                name=name,
                hosts=hosts,
                public_key=public_key,
                now_ms=now,
                valid_days=_SERVER_DAYS,
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


@contextmanager
def _explained(signer: Signer, subject: str) -> Iterator[None]:
    try:
        yield
    except IdentityError as error:
        if error.reason is IdentityReason.ROOT_TOO_OLD:
            raise AuthorityStateError("the root ends within a day: run `relay ca rotate-root`") from None
        raise AuthorityOptionError(f"not issued for {subject}: {error.reason}") from None
    except ValueError:
        # Without the library's text, which can show what was read.
        raise AuthorityStateError(f"the root {signer.kid} is damaged") from None


def _kid(pem: str) -> str:
    return kid_of(certificates_in(pem)[0])
