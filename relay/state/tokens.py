"""What is kept of agents' tokens: which were issued, and which are revoked before they expire, by ``jti``.

The commands append, and a running relay reads the revoked. Of those that were issued it reads nothing: a
token is proven by its signature, and the list tells the operator who has one, and until when. A revocation
stays: the relay does not know when a token of another issuer expires. Must not hold a token, nor verify one.
"""

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from relay.state.ledger import Entry, Ledger
from relay.state.merging import LazyEntries, SharedForm

_JTI = re.compile(r"[\x20-\x7E]{1,128}")


def is_jti(text: str) -> bool:
    """Return whether a token that this relay accepts can have this ``jti``."""
    return _JTI.fullmatch(text) is not None


class RevokedJtis:
    """The ``jti`` of every revoked token, and when that was, in ms since 1970; 0 if it is not on record."""

    def __init__(self, times: Mapping[str, int] | None = None) -> None:
        self.times = dict(times or {})

    def copy(self) -> "RevokedJtis":
        """Return an independent copy."""
        return RevokedJtis(self.times)

    def apply(self, entry: Entry) -> None:
        """Apply the next entry, as ``relay.state.ledger.LedgerState`` describes."""
        jti = entry["jti"]
        if not isinstance(jti, str):
            raise TypeError(jti)
        self.times.setdefault(jti, int(entry.get("revoked_at_ms", 0)))


class RevokedTokens:
    """The list in ``path``, which is made with the first entry.

    Everything raises LedgerError if the file is damaged, and OSError if it cannot be used.
    """

    def __init__(self, path: Path) -> None:
        self.ledger = Ledger(path, RevokedJtis())

    def revoke(self, jti: str, now_ms: int) -> None:
        """Revoke the token ``jti``. Repeating it changes nothing."""
        with self.ledger.locked() as revoked:
            if jti not in revoked.times:
                self.ledger.append({"jti": jti, "revoked_at_ms": now_ms})

    def times(self) -> Mapping[str, int]:
        """Return when each revoked token was revoked, by ``jti``."""
        return self.ledger.read().times

    def jtis(self) -> frozenset[str]:
        """Return the ``jti`` of every revoked token."""
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
        """Return its members for programs."""
        return asdict(self)


class IssuedJtis:
    """Every token that was signed, by ``jti``, in order."""

    def __init__(self, tokens: Mapping[str, IssuedToken] | None = None) -> None:
        self.tokens = dict(tokens or {})

    def copy(self) -> "IssuedJtis":
        """Return an independent copy."""
        return IssuedJtis(self.tokens)

    def apply(self, entry: Entry) -> None:
        """Apply the next entry, as ``relay.state.ledger.LedgerState`` describes."""
        token = IssuedToken(**{**entry, "scopes": tuple(entry["scopes"])})
        self.tokens[token.jti] = token


class IssuedTokens:
    """The list in ``path``, which is made with the first entry; errors are as those of ``RevokedTokens``."""

    def __init__(self, path: Path) -> None:
        self.ledger = Ledger(path, IssuedJtis())

    def add(self, token: IssuedToken) -> None:
        """Add a token, before it is handed out."""
        with self.ledger.locked():
            self.ledger.append(dict(token.facts()))

    def all(self) -> Mapping[str, IssuedToken]:
        """Return every token by its ``jti``, in the order in which they were issued."""
        return self.ledger.read().tokens


def _key_of(entry: Entry) -> str:
    if not is_jti(entry["jti"]):
        raise ValueError("not a jti")
    return _digest(entry["jti"])


def _digest(jti: str) -> str:
    """Return the SHA-256 in hex: an issuer may have put any character into a ``jti``."""
    return sha256(jti.encode("ascii")).hexdigest()


def _shared(revoked: RevokedJtis) -> Mapping[str, Entry]:
    jtis = {_digest(jti): jti for jti in revoked.times}
    return LazyEntries(jtis, lambda key: {"jti": jtis[key], "revoked_ms": revoked.times[jtis[key]]})


TOKEN_REVOCATIONS = SharedForm(
    key_of=_key_of,
    entries=_shared,
    has=lambda revoked, entry: entry["jti"] in revoked.times,
    line=lambda _revoked, entry, _now_ms: {"jti": entry["jti"], "revoked_at_ms": entry["revoked_ms"]},
)
