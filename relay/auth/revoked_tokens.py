"""The tokens that are void before their time, by ``jti``.

The command writes them down and a running relay looks. They stay: nobody here knows when a token that another
issuer signed would have ended. Must not hold a token, nor judge one.
"""

import re
from pathlib import Path

from relay.ledger import Entry, Ledger

_JTI = re.compile(r"[\x20-\x7E]{1,128}")


def is_jti(text: str) -> bool:
    """Tell whether a token that this relay accepts can have this ``jti``."""
    return _JTI.fullmatch(text) is not None


class _Void:
    """What the entries come to."""

    def __init__(self, jtis: frozenset[str] | set[str] = frozenset()) -> None:
        self._jtis = set(jtis)

    def copy(self) -> "_Void":
        return _Void(self._jtis)

    def apply(self, entry: Entry) -> None:
        jti = entry["jti"]
        if not isinstance(jti, str):
            raise TypeError(jti)
        self._jtis.add(jti)

    def jtis(self) -> frozenset[str]:
        return frozenset(self._jtis)


class RevokedTokens:
    """The list in ``path``, which is made with the first entry."""

    def __init__(self, path: Path) -> None:
        self._ledger = Ledger(path, _Void())

    @property
    def stamp(self) -> tuple[int, int, int]:
        """What differs after every revocation: a cheap look for whoever watches."""
        return self._ledger.stamp

    def revoke(self, jti: str, now_ms: int) -> None:
        """Write down that the token ``jti`` is void. Twice is as good as once.

        Raises:
            LedgerError: the file is damaged.
            OSError: it cannot be written.
        """
        with self._ledger.locked() as void:
            if jti not in void.jtis():
                self._ledger.append({"jti": jti, "revoked_at_ms": now_ms})

    def jtis(self) -> frozenset[str]:
        """Return the ``jti`` of every void token.

        Raises:
            LedgerError: the file is damaged.
        """
        return self._ledger.read().jtis()
