"""Signs what the CA issues, and returns the record of it for the ledger.

Must not decide whether to issue, and must not read or write files.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import sha1
from typing import Generic, TypeVar

from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey, EllipticCurvePublicKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from nacl.signing import SigningKey

from relay.pki.certificate_builder import (
    cross_certify,
    issue_client,
    issue_leaf,
    issue_server,
    make_root,
    make_server_root,
)
from relay.pki.errors import (
    AuthorityOptionError,
    AuthorityStateError,
    CertificateRefusedError,
    MalformedNameError,
)
from relay.state.certificates import IssuedLeaf, IssuedServer
from schemas.certificates import IdentityError, IdentityReason, end_of, read_csr
from schemas.identity import first_certificate_in, kid_of
from schemas.projection import is_node_id
from schemas.text import printable
from schemas.times import FIRST_CREDIBLE_MS

_ROOT_DAYS = 3650
_LEAF_DAYS = 90
_SERIAL_BYTES = 16
_SEED_BYTES = 32
_KEY_ID_DIGITS = 8
_MALFORMED = frozenset({IdentityReason.NOT_A_TENANT, IdentityReason.NOT_A_HOST, IdentityReason.NOT_A_NAME})


KeyT = TypeVar("KeyT")


@dataclass(frozen=True, slots=True)
class Signer(Generic[KeyT]):
    """A root and its key: Ed25519 for nodes and the broker's clients, P-256 for servers."""

    pem: str
    key: KeyT = field(repr=False)

    @property
    def kid(self) -> str:
        """The thumbprint of the root."""
        return _kid(self.pem)


class Issuing:
    """Signs. Time and randomness are arguments."""

    def __init__(self, now_ms: Callable[[], int], random_bytes: Callable[[int], bytes]) -> None:
        self._now_ms = now_ms
        self._random_bytes = random_bytes

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
        if self._now_ms() < FIRST_CREDIBLE_MS:
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

    def client(
        self, signer: Signer[SigningKey], name: str, uri: str, public_key: bytes, valid_days: int
    ) -> tuple[IssuedServer, str]:
        """Return the certificate of a client of the broker that is no node: the record of it, and its PEM.

        Raises:
            AuthorityOptionError: name or key are not of their form, or the name is a node's.
            AuthorityStateError: the root is damaged, or ends within a day.
        """
        now, serial = self._now_ms(), self._serial()
        with _explained(signer, f"client {printable(name)!r}"):
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
        with _explained(signer, f"server {printable(name)!r}"):
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
def _explained(signer: Signer[KeyT], subject: str) -> Iterator[None]:
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
