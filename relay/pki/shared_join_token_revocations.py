"""The revocations of join tokens, as the relays of a fleet have them in common.

A revocation is final, so the revocations of all relays together count, in any order. Every relay keeps all
of them: the one that enrols may be restored from an older backup, and the servers may lose theirs. Must not
share a token, its key or its id: an entry has the digest of the id.
"""

from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from itertools import islice

from relay.ledger import Entry
from relay.pki.join_tokens import JoinTokens
from relay.shared_ledger import AT_ONCE


class SharedJoinTokenRevocations:
    """A ``relay.shared_ledger.SharedLedger`` of ``tokens``."""

    kind = "join_token_revocation"
    ordered = False

    def __init__(self, tokens: JoinTokens) -> None:
        self._tokens = tokens

    def key_of(self, entry: Entry) -> str:
        """Return what names the token: the digest of its id."""
        return str(entry["token"])

    def settle(self, arrived: Mapping[str, Entry], known: AbstractSet[str]) -> Mapping[str, Entry]:
        """Revoke what was revoked elsewhere; return what was revoked and is not known there."""
        if arrived.keys() - self._tokens.revoked().keys():
            self._tokens.revoke_all({token: entry["revoked_ms"] for token, entry in arrived.items()})
        revoked = self._tokens.revoked()
        missing = islice((token for token in revoked if token not in known), AT_ONCE)
        return {token: {"token": token, "revoked_ms": revoked[token]} for token in missing}
