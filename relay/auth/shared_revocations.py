"""The revocations of agents' tokens, as the relays of a fleet have them in common.

A revocation is final, so the revocations of all relays together count, in any order. Must not share what a
token allows, or who has it.
"""

from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from hashlib import sha256
from itertools import islice

from relay.auth.revoked_tokens import RevokedTokens, is_jti
from relay.ledger import Entry
from relay.shared_ledger import AT_ONCE


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

    def settle(self, arrived: Mapping[str, Entry], known: AbstractSet[str]) -> Mapping[str, Entry]:
        """Revoke what was revoked elsewhere; return what was revoked and is not known there."""
        told = {entry["jti"]: entry["revoked_ms"] for entry in arrived.values()}
        if told.keys() - self._tokens.times().keys():
            self._tokens.revoke_all(told)
        revoked = self._tokens.times()
        missing = islice((jti for jti in revoked if _key(jti) not in known), AT_ONCE)
        return {_key(jti): {"jti": jti, "revoked_ms": revoked[jti]} for jti in missing}


def _key(jti: str) -> str:
    return sha256(jti.encode("ascii")).hexdigest()
