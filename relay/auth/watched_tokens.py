"""Ends what agents' tokens allow when they are revoked. Must not read a token."""

from collections.abc import Callable, Sequence

from structlog.typing import FilteringBoundLogger

from relay.auth.revoked_tokens import RevokedTokens
from relay.auth.shared_revocations import SharedTokenRevocations
from relay.watched_ledger import Record


class WatchedTokens:
    """The list of revoked tokens as a ``relay.watched_ledger.WatchedLedger``.

    ``revoke`` are called with all revoked tokens when there is a new one.
    """

    name = "tokens"
    kinds = (SharedTokenRevocations.kind,)

    def __init__(
        self,
        tokens: RevokedTokens,
        revoke: Sequence[Callable[[frozenset[str]], None]],
        record: Record,
        log: FilteringBoundLogger,
    ) -> None:
        self._tokens = tokens
        self._revoke = revoke
        self._record = record
        self._log = log
        self._jtis: frozenset[str] = frozenset()

    def stamp(self) -> object:
        """Return what differs after every revocation."""
        return self._tokens.stamp

    def read(self) -> frozenset[str]:
        """Return the ``jti`` of all that are revoked."""
        return self._tokens.jtis()

    def begin(self, jtis: frozenset[str]) -> None:
        """Apply what was revoked before the relay was started."""
        self._jtis = jtis
        self._apply()

    def apply(self, jtis: frozenset[str]) -> None:
        """Apply what was revoked since, and record it."""
        if not self._jtis <= jtis:
            # A list that has shrunk was lost or restored: what was revoked stays so while this process runs.
            self._log.error("revoked tokens are missing from the list", count=len(self._jtis - jtis))
        revoked, self._jtis = jtis - self._jtis, jtis | self._jtis
        self._apply()
        for jti in sorted(revoked):
            self._record("token_revoked", jti=jti)

    def _apply(self) -> None:
        for act in self._revoke:
            act(self._jtis)
