"""The revocations of agents' tokens, as the relays of a fleet have them in common.

A revocation is final, so the revocations of all relays together count, in any order. Must not share what a
token allows, or who has it.
"""

from collections.abc import Container, Mapping, Sequence
from hashlib import sha256

from relay.auth.revoked_tokens import RevokedTokens, is_jti
from relay.ledger import Entry
from relay.shared_ledger import FinalEntries, settle_final


class SharedTokenRevocations:
    """A ``relay.shared_ledger.SharedLedger`` of ``tokens``."""

    kind = "token_revocation"
    ordered = False

    def __init__(self, tokens: RevokedTokens) -> None:
        self._tokens = tokens

    def key_of(self, entry: Entry) -> str:
        """Return the SHA-256 of the ``jti``, in hex: an issuer may have put any character into it.

        Raises:
            ValueError: no token has this ``jti``.
        """
        if not is_jti(entry["jti"]):
            raise ValueError("not a jti")
        return _key(entry["jti"])

    def end_ms_of(self, _entry: Entry) -> None:
        """It never ends: when a token of another issuer expires is not known."""

    def settle(self, arrived: Mapping[str, Entry], known: Container[str]) -> Mapping[str, Entry]:
        """Revoke what was revoked elsewhere; return what was revoked and is not known there."""
        return settle_final(arrived, known, read=self._revoked, add=self._revoke)

    def _revoked(self) -> FinalEntries:
        times = self._tokens.times()
        jtis = {_key(jti): jti for jti in times}
        return FinalEntries(jtis.keys(), lambda key: {"jti": jtis[key], "revoked_ms": times[jtis[key]]})

    def _revoke(self, entries: Sequence[Entry]) -> None:
        self._tokens.revoke_all({entry["jti"]: entry["revoked_ms"] for entry in entries})


def _key(jti: str) -> str:
    return sha256(jti.encode("ascii")).hexdigest()
