"""The agents' tokens that this relay has signed, for the operator: who has one, and until when.

A command appends before it prints the token. Nothing decides by this list: a token is proven by its
signature, and refused by ``revoked_tokens``. Must not hold a token.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from relay.ledger import Entry, Ledger


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


class _Issued:
    """Every token that was signed, by ``jti``, in order."""

    def __init__(self, tokens: Mapping[str, IssuedToken] | None = None) -> None:
        self.tokens = dict(tokens or {})

    def copy(self) -> "_Issued":
        return _Issued(self.tokens)

    def apply(self, entry: Entry) -> None:
        token = IssuedToken(**{**entry, "scopes": tuple(entry["scopes"])})
        self.tokens[token.jti] = token


class IssuedTokens:
    """The list in ``path``, which is made with the first entry."""

    def __init__(self, path: Path) -> None:
        self._ledger = Ledger(path, _Issued())

    def add(self, token: IssuedToken) -> None:
        """Add a token, before it is handed out.

        Raises:
            LedgerError: the file is damaged.
            OSError: it cannot be written.
        """
        with self._ledger.locked():
            self._ledger.append(dict(token.facts()))

    def all(self) -> Mapping[str, IssuedToken]:
        """Return every token by its ``jti``, in the order in which they were issued.

        Raises:
            LedgerError: the file is damaged.
        """
        return self._ledger.read().tokens
