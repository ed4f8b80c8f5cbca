"""The part of the CA that issues for servers: a P-256 root of their own, and what it issues.

It is trusted for servers alone, by its own extension and by every verifier of nodes. Its files are those of
``roots`` with the prefix ``server-``, and

| file | mode | holds |
|---|---|---|
| `server-cross.pem` | 0644 | the server root as certified by the root of nodes; see ``create`` |
| `server-endorsements` | 0600 or 0640 | where the CA's key is not: their endorsements by roots of nodes |

Must not issue for nodes, or for clients of the broker.
"""

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey, EllipticCurvePublicKey
from cryptography.x509.oid import NameOID
from nacl.signing import SigningKey

from relay.pki.ca_ledger import CaLedger
from relay.pki.errors import AuthorityOptionError, AuthorityStateError
from relay.pki.issuing import Issuing, Signer
from relay.pki.roots import P256, RootFiles, end_of_overlap
from relay.pki.server_keys import make_server_key
from relay.state.certificates import rotation
from schemas.files import read_state, write_atomic
from schemas.identity import CertificateFormatError, certificates_in, to_pem

_ENDORSEMENT = re.compile(r"[A-Za-z0-9_-]{86}")
_MAX_ENDORSEMENTS = 4
ENDORSEMENTS = "server-endorsements"
"""The file, on a relay without the CA's key, with what roots of nodes have signed of the roots of servers."""


class EndorsedRoots(NamedTuple):
    """The roots of servers that are trusted now, in PEM, and their endorsement by each root of nodes."""

    pem: str
    endorsements: list[str]


class ServerAuthority:
    """The roots of servers in ``directory``, beside those of nodes, whose ledger and lock they share."""

    def __init__(
        self,
        directory: Path,
        issuing: Issuing,
        ledger: CaLedger,
        now_ms: Callable[[], int],
        random_bytes: Callable[[int], bytes],
    ) -> None:
        self._roots = RootFiles(directory, P256, "server-")
        self._cross = directory / "server-cross.pem"
        self._issuing = issuing
        self._ledger = ledger
        self._now_ms = now_ms
        self._random_bytes = random_bytes
        self.root_file = self._roots.certificate

    @property
    def files(self) -> list[Path]:
        """Every file that is there, keys last."""
        return [*([self._cross] if self._cross.exists() else []), *self._roots.files]

    def exist(self) -> bool:
        """Return whether there is a root of servers; a CA of an older version has none."""
        return self.root_file.exists()

    def create(self, known: Signer[SigningKey]) -> None:
        """Make the root of servers. The caller holds the lock.

        ``known``: the root of nodes that every node trusts. Servers show a certificate of the new root by it
        too: a node of an older version, or that was not told of the new root yet, must be able to verify the
        relay. Both roots have one name, without which that certificate would not be valid.

        Raises:
            AuthorityOptionError: there is one already.
            AuthorityStateError: the clock is wrong, or a key that was left behind is damaged.
        """
        key = self._roots.unused_key() or make_server_key(self._random_bytes)
        root = self._issuing.server_root(key, _name_of(known.pem))
        write_atomic(self._cross, self._issuing.cross(known, root.pem))
        self._roots.create(root.pem, key)

    def roots(self) -> list[str]:
        """Return every root of servers that is trusted now, in PEM: the newest, then the one before it.

        Raises:
            AuthorityStateError: there is none, or a file of it is damaged.
        """
        if not self.exist():
            raise AuthorityStateError(
                f"{self._roots.directory} holds no root of servers: run `relay ca init`"
            )
        return self._roots.trusted(self._now_ms())

    def kept_endorsements(self) -> list[str]:
        """Return the endorsements that the relay with the CA's key has made; none if there is no such file.

        Nodes verify them: one of other roots is worth nothing, and does no harm.

        Raises:
            OSError: the file cannot be used.
        """
        try:
            text = read_state(self._roots.directory / ENDORSEMENTS).decode("ascii", "replace")
        except FileNotFoundError:
            return []
        return [line for line in text.splitlines() if _ENDORSEMENT.fullmatch(line)][:_MAX_ENDORSEMENTS]

    def issue(
        self, name: str, hosts: Sequence[str], public_key: EllipticCurvePublicKey, valid_days: int
    ) -> str:
        """Return what a server shows that is reached under ``hosts``, in PEM: its certificate comes first.

        Of the roots that are trusted the oldest issues it, for that is the one that every node knows.

        Raises:
            AuthorityOptionError: name or hosts are not of their form.
            AuthorityStateError: there is no root of servers, or its key is not here.
        """
        with self._ledger.locked():
            server, pem = self._issuing.server(
                self._signer(self.roots()[-1]), name, hosts, public_key, valid_days
            )
            self._ledger.append(server.entry())
        return pem + self._cross_pem()

    def _cross_pem(self) -> str:
        """Return the certificate, by a root of nodes, of the root that issues; empty if it needs none."""
        try:
            cross = to_pem(certificates_in(read_state(self._cross).decode("utf-8", "replace"))[:1])
        except FileNotFoundError:
            return ""
        except CertificateFormatError:
            raise AuthorityStateError(f"{self._cross} is damaged: it holds no certificate") from None
        return cross if _public_key(cross) == _public_key(self.roots()[-1]) else ""

    def rotate(self, overlap_days: int = 90) -> int:
        """Make a new root of servers; return until when, in ms, the one before it is trusted and issues.

        Raises:
            AuthorityOptionError: the overlap is out of bounds, or the last rotation is still under way.
            AuthorityStateError: there is no root of servers, or its key is not here.
        """
        until_ms = end_of_overlap(self._now_ms(), overlap_days)
        with self._ledger.locked():
            now, roots = self._now_ms(), self.roots()
            if len(roots) > 1:
                raise AuthorityOptionError(
                    "the root of servers before this one is still trusted: rotate when its time is up"
                )
            old = self._signer(roots[0])
            new = self._issuing.server_root(make_server_key(self._random_bytes))
            self._ledger.append({**rotation(new.kid, old.kid, until_ms, now), "of": "servers"})
            self._roots.rotate(new.pem, new.key, until_ms)
        return until_ms

    def _signer(self, root_pem: str) -> Signer[EllipticCurvePrivateKey]:
        return Signer(root_pem, self._roots.key_of(root_pem))


def _name_of(pem: str) -> str:
    (name,) = x509.load_pem_x509_certificate(pem.encode("ascii")).subject.get_attributes_for_oid(
        NameOID.COMMON_NAME
    )
    return str(name.value)


def _public_key(pem: str) -> object:
    return x509.load_pem_x509_certificate(pem.encode("ascii")).public_key()
