"""The uses of join tokens, as the relays of a fleet have them in common.

Each use of a token has a number, and belongs to the first node that was given it: of two relays that give one
use to two nodes, the stream takes one. A relay with the CA's key counts what it reads as used, and enrols no
node for that. Must not share a token, its key or its id: an entry has the digest of the id.
"""

from collections.abc import Callable, Container, Mapping
from itertools import islice

from relay.ledger import Entry
from relay.pki.join_grants import JoinGrant, JoinState, digest_of
from relay.pki.join_tokens import JoinTokens
from relay.shared_ledger import AT_ONCE

_COUNTS = {JoinState.OPEN, JoinState.USED_UP}


class SharedJoinTokenUses:
    """A ``relay.shared_ledger.SharedLedger`` of ``tokens``. ``issues``: the CA's key is here."""

    kind = "join_token_use"
    ordered = False

    def __init__(self, tokens: JoinTokens, now_ms: Callable[[], int], *, issues: bool) -> None:
        self._tokens = tokens
        self._now_ms = now_ms
        self._issues = issues

    def key_of(self, entry: Entry) -> str:
        """Return what names the use: the digest of the token's id, and the number."""
        return _key(entry["token"], entry["use"])

    def end_ms_of(self, entry: Entry) -> int:
        """Return when the token expires."""
        return int(entry["expires_at_ms"])

    def settle(self, arrived: Mapping[str, Entry], known: Container[str]) -> Mapping[str, Entry]:
        """Count what was used elsewhere; return the uses of this relay's tokens that are not known there."""
        if not self._issues:
            return {}
        grants = self._grants()
        uses = {
            (grants[entry["token"]].id, entry["use"]): entry["node_id"]
            for entry in arrived.values()
            if entry["token"] in grants and entry["use"] <= grants[entry["token"]].uses
        }
        if uses:
            self._tokens.count(uses)
            grants = self._grants()
        missing = (
            (
                _key(token, use),
                {"token": token, "use": use, "node_id": node_id, "expires_at_ms": grant.expires_at_ms},
            )
            for token, grant in grants.items()
            for use, node_id in _uses(grant)
            if _key(token, use) not in known
        )
        return dict(islice(missing, AT_ONCE))

    def _grants(self) -> Mapping[str, JoinGrant]:
        """Return the tokens that may be used, or have been, by digest."""
        now = self._now_ms()
        return {digest_of(grant.id): grant for grant in self._tokens.all() if grant.state(now) in _COUNTS}


def _uses(grant: JoinGrant) -> list[tuple[int, str]]:
    """Return every use: what is counted, and then one that is free for each node that has none."""
    counted = dict(grant.counted)
    holders = set(counted.values())
    free = (use for use in range(1, grant.uses + 1) if use not in counted)
    waiting = (node_id for node_id in grant.node_ids if node_id not in holders)
    return [*counted.items(), *zip(free, waiting, strict=False)]


def _key(token: str, use: int) -> str:
    return f"{token}-{use}"
