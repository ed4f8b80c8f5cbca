"""Agents' tokens, by ``jti``: which were issued, which are revoked, and the keys that they are verified with.

The commands append, and a running relay reads the revoked and the keys. Of those that were issued it reads
nothing: a token is proven by its signature, and the list tells the operator who has one, and until when. A
revocation stays: the relay does not know when a token of another issuer expires.

The CA of the fleet endorses each key. The relay with the CA's key adds its own; the others get them from
it. Of a key the file says until when those made before it are accepted, so that all entries together say
the same in any order. An entry counts while a root that has signed it is trusted. Must not hold a token or
a private key, nor verify a token.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from relay.state.ledger import Entry, Keyed, Ledger
from relay.state.merging import LazyEntries, SharedForm
from schemas.canonical import jcs
from schemas.certificates import is_token_key_endorsed
from schemas.identity import first_certificate_in, kid_of
from schemas.keys import is_sound_public_key
from schemas.times import SystemClock

_JTI = re.compile(r"[\x20-\x7E]{1,128}")


def is_jti(text: str) -> bool:
    """Return whether a token that this relay accepts can have this ``jti``."""
    return _JTI.fullmatch(text) is not None


def read_revocation(entry: Entry) -> tuple[str, int]:
    """Return the ``jti`` of a revoked token, and when that was, in ms; 0 if it is not on record."""
    jti = entry["jti"]
    if not isinstance(jti, str):
        raise TypeError(jti)
    return jti, int(entry.get("revoked_at_ms", 0))


class RevokedTokens:
    """The list in ``path``, which is made with the first entry.

    Everything raises LedgerError if the file is damaged, and OSError if it cannot be used.
    """

    def __init__(self, path: Path) -> None:
        self.ledger = Ledger(path, Keyed(read_revocation))

    def revoke(self, *jtis: str, now_ms: int) -> None:
        """Revoke the tokens ``jtis``, all or none. Repeating it changes nothing."""
        with self.ledger.locked() as revoked:
            if new := [jti for jti in jtis if jti not in revoked.by_key]:
                self.ledger.append(*({"jti": jti, "revoked_at_ms": now_ms} for jti in new))

    def times(self) -> Mapping[str, int]:
        return self.ledger.read().by_key

    def jtis(self) -> frozenset[str]:
        return frozenset(self.times())


@dataclass(frozen=True, slots=True)
class IssuedToken:
    """What was signed. Times in milliseconds since 1970."""

    jti: str
    tenant: str
    sub: str
    scopes: tuple[str, ...]
    audience: str
    issued_at_ms: int
    expires_at_ms: int

    def state(self, revoked: frozenset[str], now_ms: int) -> str:
        """Return ``valid``, ``revoked`` or ``expired``."""
        if self.jti in revoked:
            return "revoked"
        return "valid" if now_ms < self.expires_at_ms else "expired"

    def facts(self) -> Mapping[str, Any]:
        return asdict(self)


def read_issued_token(entry: Entry) -> tuple[str, IssuedToken]:
    """Return the token that was signed, by its ``jti``."""
    token = IssuedToken(**{**entry, "scopes": tuple(entry["scopes"])})
    return token.jti, token


class IssuedTokens:
    """The list in ``path``, which is made with the first entry; errors are as those of ``RevokedTokens``."""

    def __init__(self, path: Path) -> None:
        self.ledger = Ledger(path, Keyed(read_issued_token))

    def add(self, token: IssuedToken) -> None:
        """Add a token, before it is handed out."""
        with self.ledger.locked():
            self.ledger.append(dict(token.facts()))

    def all(self) -> Mapping[str, IssuedToken]:
        """Return every token by its ``jti``, in the order in which they were issued."""
        return self.ledger.read().by_key


def _key_of(entry: Entry) -> str:
    if not is_jti(entry["jti"]):
        raise ValueError("not a jti")
    return _digest(entry["jti"])


def _digest(jti: str) -> str:
    """Return the SHA-256 in hex: an issuer may have put any character into a ``jti``."""
    return sha256(jti.encode("ascii")).hexdigest()


def _shared(revoked: Keyed[int]) -> Mapping[str, Entry]:
    jtis = {_digest(jti): jti for jti in revoked.by_key}
    return LazyEntries(jtis, lambda key: {"jti": jtis[key], "revoked_ms": revoked.by_key[jtis[key]]})


TOKEN_REVOCATIONS = SharedForm(
    key_of=_key_of,
    entries=_shared,
    has=lambda revoked, entry: entry["jti"] in revoked.by_key,
    line=lambda _revoked, entry, _now_ms: {"jti": entry["jti"], "revoked_at_ms": entry["revoked_ms"]},
)


def key_id(public_key: bytes) -> str:
    """Return the ``kid`` of a token key: SHA-256 of its 32 bytes, hex."""
    return sha256(public_key).hexdigest()


class KeyEndorser(Protocol):
    """The CA of the fleet, as far as it endorses keys of tokens."""

    def roots(self) -> Sequence[str]:
        """Return the roots of nodes that are trusted now, in PEM."""
        ...

    def endorse_token_key(self, statement: bytes) -> Mapping[str, str]:
        """Return the endorsement of ``statement`` by each trusted root, by its kid; none without the keys."""
        ...


class AcceptedKey(NamedTuple):
    """A key that verifies tokens: 32 bytes, and until when in ms; None while no other has followed it."""

    public_key: bytes
    until_ms: int | None


@dataclass(frozen=True, slots=True)
class TokenKey:
    """What the CA says of a key.

    Attributes:
        made_ms: when it was made; 0 of the first one.
        others_until_ms: until when tokens by the keys made before it are accepted.
    """

    public_key: bytes
    made_ms: int
    others_until_ms: int

    @classmethod
    def of(cls, entry: Entry) -> "TokenKey":
        """Return the key of an entry.

        Raises:
            ValueError: it is no point by which signatures can be verified.
        """
        public_key = bytes.fromhex(entry["public_key"])
        if not is_sound_public_key(public_key):
            raise ValueError("not a sound key")
        return cls(public_key, int(entry["made_ms"]), int(entry["others_until_ms"]))

    def members(self) -> Entry:
        """Return the members of an entry that the CA signs."""
        times = {"made_ms": self.made_ms, "others_until_ms": self.others_until_ms}
        return {"public_key": self.public_key.hex(), **times}


def key_of(entry: Entry) -> str:
    """Return what names an entry: the key's kid, and that of the root that endorses it.

    Raises:
        ValueError: as ``TokenKey.of``.
    """
    return f"{key_id(TokenKey.of(entry).public_key)}-{entry['root']}"


def read_endorsement(entry: Entry) -> tuple[str, Entry]:
    """Return an entry by what names it."""
    return key_of(entry), entry


class TokenKeys:
    """The keys in ``path``, which ``ca`` endorses.

    ``own`` is the key of a relay that has its fleet alone, and not the CA's key: where nothing endorses
    it, it is the only one.

    Everything raises LedgerError if the file is damaged, AuthorityStateError if there is no CA, and OSError
    if a file cannot be used.
    """

    def __init__(self, path: Path, ca: KeyEndorser, now_ms: SystemClock, own: bytes | None = None) -> None:
        self.ledger = Ledger(path, Keyed(read_endorsement))
        self._ca = ca
        self._now_ms = now_ms
        self._own = own

    def entries(self) -> Mapping[str, Entry]:
        return self.ledger.read().by_key

    def accepted(self) -> Mapping[str, AcceptedKey]:
        """Return the keys that a trusted root endorses, by kid; some may have ended."""
        known = self._endorsed(self.ledger.read())
        if self._own is not None and key_id(self._own) not in known:
            return {key_id(self._own): AcceptedKey(self._own, None)}
        return {kid: AcceptedKey(key.public_key, _end(key, known)) for kid, key in known.items()}

    def is_replaced(self, public_key: bytes) -> bool:
        keys = [TokenKey.of(entry) for entry in self.entries().values()]
        made = [key.made_ms for key in keys if key.public_key == public_key]
        return bool(made) and any(key.made_ms > min(made) for key in keys)

    def is_endorsed(self, entry: Entry) -> bool:
        """Return whether the root that ``entry`` names is trusted, and has signed it."""
        roots = [first_certificate_in(root) for root in self._ca.roots()]
        named = [root for root in roots if kid_of(root) == entry["root"]]
        return is_token_key_endorsed(_statement(TokenKey.of(entry)), named, entry["signature"])

    def add(self, public_key: bytes, others_until_ms: int) -> None:
        """Have the CA, whose key is here, endorse ``public_key``; one that is known stays as it is.

        Tokens by the keys before it are accepted until ``others_until_ms``.
        """
        if key_id(public_key) in self._endorsed(self.ledger.read()):
            return  # without the lock: a relay must start whose disk is full, or cannot be written
        with self.ledger.locked() as kept:
            known = self._endorsed(kept)
            if key_id(public_key) in known:
                return
            newest = max((key.made_ms for key in known.values()), default=None)
            if newest is None:
                key = TokenKey(public_key, made_ms=0, others_until_ms=0)
            else:
                key = TokenKey(public_key, max(self._now_ms(), newest + 1), others_until_ms)
            self.ledger.append(*self._entries_of(key).values())

    def endorse_again(self) -> None:
        """Have each root that is trusted now endorse the keys that have not ended."""
        with self.ledger.locked() as kept:
            known, now = self._endorsed(kept), self._now_ms()
            keys = [key for key in known.values() if (end := _end(key, known)) is None or end > now]
            made = {name: entry for key in keys for name, entry in self._entries_of(key).items()}
            if new := [entry for name, entry in made.items() if name not in kept.by_key]:
                self.ledger.append(*new)

    def _entries_of(self, key: TokenKey) -> Mapping[str, Entry]:
        endorsed = self._ca.endorse_token_key(_statement(key)).items()
        entries = [key.members() | {"root": root, "signature": signature} for root, signature in endorsed]
        return {key_of(entry): entry for entry in entries}

    def _endorsed(self, kept: Keyed[Entry]) -> Mapping[str, TokenKey]:
        keys = [TokenKey.of(entry) for entry in kept.by_key.values() if self.is_endorsed(entry)]
        return {key_id(key.public_key): key for key in reversed(keys)}


def _end(key: TokenKey, known: Mapping[str, TokenKey]) -> int | None:
    """Return until when ``key`` is accepted, by those that were made after it."""
    later = (other.others_until_ms for other in known.values() if other.made_ms > key.made_ms)
    return min(later, default=None)


def _statement(key: TokenKey) -> bytes:
    return jcs(key.members())


TOKEN_KEYS = SharedForm(
    key_of=key_of,
    entries=lambda kept: kept.by_key,
    has=lambda kept, entry: key_of(entry) in kept.by_key,
    line=lambda _kept, entry, _now_ms: entry,
)
