"""The tokens that are revoked before they expire, by ``jti``.

The command appends, and a running relay reads. Entries stay: the relay does not know when a token of another
issuer expires. Must not hold a token, nor verify one.
"""

import re
from collections.abc import Mapping
from pathlib import Path

from relay.ledger import Entry, Ledger

_JTI = re.compile(r"[\x20-\x7E]{1,128}")


def is_jti(text: str) -> bool:
    """Return whether a token that this relay accepts can have this ``jti``."""
    return _JTI.fullmatch(text) is not None


class _RevokedJtis:
    """The ``jti`` of every entry, and when it was revoked, in ms since 1970; 0 if that is not on record."""

    def __init__(self, times: Mapping[str, int] | None = None) -> None:
        self.times = dict(times or {})

    def copy(self) -> "_RevokedJtis":
        return _RevokedJtis(self.times)

    def apply(self, entry: Entry) -> None:
        jti = entry["jti"]
        if not isinstance(jti, str):
            raise TypeError(jti)
        self.times.setdefault(jti, int(entry.get("revoked_at_ms", 0)))


class RevokedTokens:
    """The list in ``path``, which is made with the first entry."""

    def __init__(self, path: Path) -> None:
        self._ledger = Ledger(path, _RevokedJtis())

    @property
    def stamp(self) -> tuple[int, int, int]:
        """What differs after every revocation: a cheap check for changes."""
        return self._ledger.stamp

    def revoke(self, jti: str, now_ms: int) -> None:
        """Revoke the token ``jti``. Repeating it changes nothing.

        Raises:
            LedgerError: the file is damaged.
            OSError: it cannot be written.
        """
        self.revoke_all({jti: now_ms})

    def revoke_all(self, times: Mapping[str, int]) -> None:
        """Revoke several tokens, by ``jti``, each at its time, as ``revoke`` does."""
        with self._ledger.locked() as revoked:
            new = times.keys() - revoked.times.keys()
            if new:
                self._ledger.append(*({"jti": jti, "revoked_at_ms": times[jti]} for jti in sorted(new)))

    def jtis(self) -> frozenset[str]:
        """Return the ``jti`` of every revoked token.

        Raises:
            LedgerError: the file is damaged.
        """
        return frozenset(self.times())

    def times(self) -> Mapping[str, int]:
        """Return when each revoked token was revoked, by ``jti``.

        Raises:
            LedgerError: the file is damaged.
        """
        return self._ledger.read().times
