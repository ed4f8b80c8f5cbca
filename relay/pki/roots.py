"""Keys and roots as files: the current root, the one before it while it is trusted, and their keys.

| file | mode | holds |
|---|---|---|
| `root.pem` | 0644 | the current root |
| `root.key` | 0600 | its key |
| `previous.pem` | 0644 | the root before it, until when it is trusted, and its endorsement of `root.pem` |
| `previous.key` | 0600 | its key |
| `next.key` | 0600 | the key of `root.pem` if a rotation was cut short, else unused |

Those of the servers' root are `server-root.pem` and so on; it is endorsed elsewhere. A key is found by the
root that it fits, not by its name, so one rename completes a rotation, and a rotation cut short anywhere
leaves each root its key. The keys of servers are P-256, as PKCS #8 PEM: clients with BoringSSL, and Go's,
refuse Ed25519 in TLS (decision 0047). Must not decide what a root issues, and must not put a byte of a key
into an error.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ec import (
    SECP256R1,
    EllipticCurvePrivateKey,
    derive_private_key,
)
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)
from nacl.signing import SigningKey

from relay.pki.errors import AuthorityOptionError, AuthorityStateError
from relay.state.key_files import KeyFileError, load_or_create, read_key
from schemas.files import PRIVATE, read_private, read_state, write_atomic
from schemas.identity import CertificateFormatError, certificates_in, first_certificate_in, is_for_key, to_pem
from schemas.keys import private_key_to_pem

_ORDER = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551
# FIPS 186-5, A.2.1: 64 more bits than the order has, so that the remainder is not biased.
_RANDOM_BYTES = 40
MAX_OVERLAP_DAYS = 3650
_DAY_MS = 86_400_000
_UNTIL = "trusted-until-ms: "
_ENDORSEMENT = "endorsement: "
_HEAD = re.compile(rf"{_UNTIL}([0-9]{{1,15}})\n(?:{_ENDORSEMENT}([A-Za-z0-9_-]{{86}})\n)?")
KeyT = TypeVar("KeyT")


def make_server_key(random_bytes: Callable[[int], bytes]) -> EllipticCurvePrivateKey:
    """Return a new key."""
    secret = int.from_bytes(random_bytes(_RANDOM_BYTES), "big") % (_ORDER - 1) + 1
    return derive_private_key(secret, SECP256R1())


def server_key_to_pem(key: EllipticCurvePrivateKey) -> str:
    """Return ``key`` as PKCS #8 PEM."""
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()).decode("ascii")


def read_server_key(path: Path) -> EllipticCurvePrivateKey:
    """Return the key in ``path``.

    Raises:
        FileNotFoundError: there is none.
        KeyFileError: the file is damaged, or holds a key of another kind.
        ExposedFileError: others can read it.
    """
    try:
        key = load_pem_private_key(read_private(path).encode("utf-8"), None)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        # Without the error's own text, which can show a part of the key.
        raise KeyFileError(f"{path} is damaged: it holds no key") from None
    if not isinstance(key, EllipticCurvePrivateKey) or not isinstance(key.curve, SECP256R1):
        raise KeyFileError(f"{path} holds no P-256 key")
    return key


def load_or_create_server_key(path: Path, random_bytes: Callable[[int], bytes]) -> EllipticCurvePrivateKey:
    """Return the key in ``path``, made on first use, as ``load_or_create`` does."""
    return load_or_create(path, read_server_key, lambda: make_server_key(random_bytes), server_key_to_pem)


@dataclass(frozen=True, slots=True)
class KeyForm(Generic[KeyT]):
    """A kind of key: how it is read from a file, what it is in PEM, whether it is that of a certificate."""

    read: Callable[[Path], KeyT]
    to_pem: Callable[[KeyT], str]
    fits: Callable[[KeyT, bytes], bool]


def _is_for_server_key(key: EllipticCurvePrivateKey, der: bytes) -> bool:
    return x509.load_der_x509_certificate(der).public_key() == key.public_key()


ED25519: KeyForm[SigningKey] = KeyForm(
    read_key, private_key_to_pem, lambda key, der: is_for_key(der, bytes(key.verify_key))
)


P256: KeyForm[EllipticCurvePrivateKey] = KeyForm(read_server_key, server_key_to_pem, _is_for_server_key)


class _Previous(NamedTuple):
    """The root before the current one. Rotations of the first version endorsed nothing."""

    pem: str
    until_ms: int
    endorsement: str | None


class RootFiles(Generic[KeyT]):
    """The roots in ``directory`` whose files' names begin with ``prefix``.

    Writers hold the lock of the ledger beside them.
    """

    def __init__(self, directory: Path, form: KeyForm[KeyT], prefix: str = "") -> None:
        self.directory = directory
        self.certificate = directory / f"{prefix}root.pem"
        self._form = form
        self._key = directory / f"{prefix}root.key"
        self._next_key = directory / f"{prefix}next.key"
        self._previous = directory / f"{prefix}previous.pem"
        self._previous_key = directory / f"{prefix}previous.key"
        self._known: dict[Path, tuple[tuple[int, ...], tuple[str, str]]] = {}

    @property
    def files(self) -> list[Path]:
        """Every file that is there, keys last."""
        places = (self.certificate, self._previous, self._key, self._next_key, self._previous_key)
        return [path for path in places if path.exists()]

    def create(self, root_pem: str, key: KeyT) -> None:
        """Write the first root.

        Raises:
            AuthorityOptionError: there is one already. It is never overwritten.
            AuthorityStateError: its key is there without it.
        """
        if self.certificate.exists():
            text = f"{self.directory} holds a CA already, which is kept: use it, or name another directory"
            raise AuthorityOptionError(text)
        der = first_certificate_in(root_pem)
        held = self.unused_key()
        if self._key.exists() and (held is None or not self._form.fits(held, der)):
            raise AuthorityStateError(f"{self._key} is there without its root: restore it or remove the key")
        write_atomic(self._key, self._form.to_pem(key), PRIVATE)
        write_atomic(self.certificate, root_pem)

    def unused_key(self) -> KeyT | None:
        """Return the key that ``create`` left when it was cut short before its root was written.

        Raises:
            AuthorityStateError: it is damaged.
        """
        return None if self.certificate.exists() else self._key_in(self._key)

    def current(self) -> str:
        """Return the current root, in PEM.

        Raises:
            AuthorityStateError: there is no CA here, or its certificate is damaged.
        """
        try:
            return self._certificate_in(self.certificate)[0]
        except FileNotFoundError:
            raise AuthorityStateError(f"{self.directory} holds no CA: run `relay ca init`") from None

    def trusted(self, now_ms: int) -> list[str]:
        """Return the current root, and the one before it until its time is up.

        Raises:
            AuthorityStateError: as ``current``.
        """
        # The current one first: a concurrent rotation writes the previous one before it.
        current = self.current()
        previous = self._before(current)
        return [current] if previous is None or previous.until_ms <= now_ms else [current, previous.pem]

    def endorsement(self) -> str | None:
        """Return what the root before the current one has signed of it; None if there was none before it.

        Raises:
            AuthorityStateError: as ``current``.
        """
        previous = self._before(self.current())
        return None if previous is None else previous.endorsement

    def _before(self, current: str) -> "_Previous | None":
        try:
            root, text = self._certificate_in(self._previous)
        except FileNotFoundError:
            return None
        head = _HEAD.match(text)
        if head is None:
            raise AuthorityStateError(f"{self._previous} is damaged: it names no end of trust")
        # A rotation that was cut short before its end has put the current root there too.
        return None if root == current else _Previous(root, int(head[1]), head[2])

    def _certificate_in(self, path: Path) -> tuple[str, str]:
        """Return the certificate in a file, in PEM, and all of its text; one that has not changed is kept."""
        facts = path.lstat()
        stamp = (facts.st_ino, facts.st_size, facts.st_mtime_ns, facts.st_mode, facts.st_uid)
        known = self._known.get(path)
        if known is None or known[0] != stamp:
            # The stamp before the content: a change during the read gives the next read another stamp.
            text = read_state(path).decode("utf-8", "replace")
            known = self._known[path] = (stamp, (_certificate_of(path, text), text))
        return known[1]

    def key_of(self, root_pem: str) -> KeyT:
        """Return the key of a root.

        Raises:
            AuthorityStateError: it is not here, or is damaged.
            ExposedFileError: others can read it.
        """
        der = first_certificate_in(root_pem)
        # The first a second time: a concurrent rotation may just have renamed it.
        for path in (self._key, self._next_key, self._key, self._previous_key):
            key = self._key_in(path)
            if key is not None and self._form.fits(key, der):
                return key
        where = self._key if root_pem == self.current() else self._previous_key
        if not where.exists():
            raise AuthorityStateError(
                f"{where} is not here: do this at the relay with the CA's key, or put it back"
            )
        raise AuthorityStateError(f"{where} is not the key of its root: put that back")

    def rotate(self, root_pem: str, key: KeyT, until_ms: int, endorsement: str | None = None) -> None:
        """Replace the current root, which stays trusted until ``until_ms``; it has signed ``endorsement``.

        Raises:
            AuthorityStateError: as ``key_of``; nothing has changed then.
            OSError: it was cut short; ``current`` returns the root in force. It can be repeated.
        """
        old = self.current()
        old_key = self.key_of(old)
        # In one file with its root, so that a rotation cut short leaves no endorsement of another root.
        head = f"{_UNTIL}{until_ms}\n"
        if endorsement is not None:
            head += f"{_ENDORSEMENT}{endorsement}\n"
        write_atomic(self._previous_key, self._form.to_pem(old_key), PRIVATE)
        write_atomic(self._previous, head + old)
        write_atomic(self._next_key, self._form.to_pem(key), PRIVATE)
        write_atomic(self.certificate, root_pem)  # completes the rotation
        self._next_key.replace(self._key)

    def _key_in(self, path: Path) -> KeyT | None:
        try:
            return self._form.read(path)
        except FileNotFoundError:
            return None
        except KeyFileError as error:
            raise AuthorityStateError(str(error)) from None


def end_of_overlap(now_ms: int, days: int) -> int:
    """Return until when, in ms, the old root is trusted beside one that is made now.

    Raises:
        AuthorityOptionError: ``days`` is out of bounds.
    """
    if not 1 <= days <= MAX_OVERLAP_DAYS:
        raise AuthorityOptionError(f"both roots can be trusted for 1 to {MAX_OVERLAP_DAYS} days")
    return now_ms + days * _DAY_MS


def _certificate_of(path: Path, text: str) -> str:
    try:
        certificates = certificates_in(text)
    except CertificateFormatError:
        certificates = []
    if not certificates:
        # Trusting no root would refuse every node, and log nothing.
        raise AuthorityStateError(f"{path} is damaged: it holds no certificate")
    return to_pem(certificates[:1])
