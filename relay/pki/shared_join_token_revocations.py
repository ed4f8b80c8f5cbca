"""The revocations of join tokens, as the relays of a fleet have them in common.

A revocation is final, so the revocations of all relays together count, in any order. Every relay keeps all
of them: the one that enrols may be restored from an older backup, and the servers may lose theirs. Must not
share a token, its key or its id: an entry has the digest of the id.
"""

from collections.abc import Callable, Container, Mapping, Sequence

from relay.ledger import Entry
from relay.pki.join_tokens import MAX_TTL_S, JoinTokens
from relay.shared_ledger import FinalEntries, settle_final


class SharedJoinTokenRevocations:
    """A ``relay.shared_ledger.SharedLedger`` of ``tokens``."""

    kind = "join_token_revocation"
    ordered = False

    def __init__(self, tokens: JoinTokens, now_ms: Callable[[], int]) -> None:
        self._tokens = tokens
        self._now_ms = now_ms

    def key_of(self, entry: Entry) -> str:
        """Return what names the token: the digest of its id."""
        return str(entry["token"])

    def end_ms_of(self, entry: Entry) -> int:
        """Return when a token has expired in any case that was made before it was revoked."""
        return int(entry["revoked_ms"]) + MAX_TTL_S * 1000

    def settle(self, arrived: Mapping[str, Entry], known: Container[str]) -> Mapping[str, Entry]:
        """Revoke what was revoked elsewhere; return what was revoked and is not known there."""
        return settle_final(arrived, known, read=self._revoked, add=self._revoke, lasts=self._lasts)

    def _revoked(self) -> FinalEntries:
        revoked = self._tokens.revoked()
        return FinalEntries(revoked.keys(), lambda token: {"token": token, "revoked_ms": revoked[token]})

    def _lasts(self, entry: Entry) -> bool:
        return self.end_ms_of(entry) > self._now_ms()

    def _revoke(self, entries: Sequence[Entry]) -> None:
        self._tokens.revoke_all({entry["token"]: entry["revoked_ms"] for entry in entries})
