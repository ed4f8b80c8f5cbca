"""The join tokens that the operator made: how many nodes may still enrol with one, and into which tenant.

The file holds the tokens' keys, so it is for its owner alone. Of a token that another relay of the fleet has
made it can say one thing, that it is revoked. Must not judge proofs, must not issue, and must not know
what a label or a tag may be.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from hashlib import sha256
from pathlib import Path

from relay.ledger import Ledger
from relay.pki.join_grants import KEY_BYTES, JoinGrant, JoinGrants, JoinState, digest_of
from schemas.certificates import UNENROLLED_TENANT
from schemas.enrolment import JoinToken
from schemas.error_roots import OperatorError, PeerError
from schemas.identity import TENANT_PATTERN, first_certificate_in
from schemas.keys import base64url
from schemas.text import printable
from schemas.ulids import UlidSource

MAX_TTL_S = 30 * 86_400
MAX_USES = 10_000
_ID = re.compile(r"[0-9A-HJKMNP-TV-Z]{26}")


class JoinError(OperatorError):
    """A join token is not made, or not known; the text says why."""


class JoinRefusedError(PeerError):
    """A node may not enrol with this join token."""


class JoinTokens:
    """The join tokens in ``path``. Time and randomness are arguments.

    Everything raises LedgerError if the file is damaged, and OSError if it cannot be used.
    """

    def __init__(self, path: Path, now_ms: Callable[[], int], random_bytes: Callable[[int], bytes]) -> None:
        self._ledger = Ledger(path, JoinGrants(), secret=True)
        self._now_ms = now_ms
        self._random_bytes = random_bytes
        self._ulids = UlidSource(now_ms, random_bytes)

    @property
    def stamp(self) -> tuple[int, int, int]:
        """What differs after every entry: a cheap check for changes."""
        return self._ledger.stamp

    def create(  # noqa: PLR0913, PLR0917 - what a token is made of
        self,
        tenant: str,
        ttl_s: int,
        uses: int,
        root_pem: str,
        label: str = "",
        tags: Sequence[str] = (),
        replaces: str = "",
    ) -> JoinToken:
        """Make a token for ``uses`` nodes; it pins ``root_pem`` as the root of this relay's CA.

        ``label`` and ``tags`` are of their form, and no node of the tenant has the label. ``replaces`` is the
        id of a node that enrols again.

        Raises:
            JoinError: tenant, time or number are out of bounds, or another token gives the label.
        """
        if not re.fullmatch(TENANT_PATTERN, tenant) or tenant == UNENROLLED_TENANT:
            raise JoinError(f"{printable(tenant)!r} is not a tenant: use a-z, 0-9, - and _")
        if not 1 <= ttl_s <= MAX_TTL_S:
            raise JoinError(f"a join token is good for at most {MAX_TTL_S // 86_400} days")
        if not 1 <= uses <= MAX_USES:
            raise JoinError(f"a join token is good for 1 to {MAX_USES} nodes")
        if label and uses != 1:
            raise JoinError("a label is for one node: give the token one use, or no label")
        if replaces and uses != 1:
            raise JoinError("a node's id is for one node: give the token one use")
        key = self._random_bytes(KEY_BYTES)
        token = JoinToken(self._ulids.new(), key, sha256(first_certificate_in(root_pem)).digest())
        now = self._now_ms()
        entry = {
            "action": "create",
            "ts_ms": now,
            "id": token.id,
            "tenant": tenant,
            "key": base64url(key),
            "expires_at_ms": now + ttl_s * 1000,
            "uses": uses,
        }
        with self._ledger.locked() as state:
            if label and (holder := state.giver_of(tenant, label, now)) is not None:
                raise JoinError(
                    f"join token {holder} gives the label {label!r}: revoke it, or choose another"
                )
            given = {"label": label, "tags": list(tags), "replaces": replaces}
            self._ledger.append(entry | {name: value for name, value in given.items() if value})
        return token

    def find(self, join_id: str) -> JoinGrant | None:
        """Return what the token allows; None if it is unknown, expired or revoked.

        A token that is used up is returned, for a node that lost the answer: see ``spend``.
        """
        grant = self._ledger.read().grants.get(join_id)
        dead = grant is None or grant.state(self._now_ms()) in {JoinState.EXPIRED, JoinState.REVOKED}
        return None if dead else grant

    def spend(self, join_id: str, node_id: str) -> None:
        """Count ``node_id``, once, against the uses of the token.

        Raises:
            JoinRefusedError: the token is unknown, expired, revoked, or used up by others.
        """
        with self._ledger.locked() as state:
            grant = state.grants.get(join_id)
            if grant is None or not grant.admits(node_id, self._now_ms()):
                raise JoinRefusedError("the join token is not good for another node")
            if node_id not in grant.node_ids:
                now = self._now_ms()
                self._ledger.append({"action": "spend", "ts_ms": now, "id": join_id, "node_id": node_id})

    def count(self, uses: Mapping[tuple[str, int], str]) -> None:
        """Record uses as the fleet has counted them: whose each is, by the token's id and its number.

        That node may not enrol with it here for that: who is told of a use is not told by the node.
        """
        now = self._now_ms()
        with self._ledger.locked() as state:
            known = {(join_id, use) for join_id, _ in uses for use, _ in state.grants[join_id].counted}
            new = [
                {"action": "count", "ts_ms": now, "id": join_id, "use": use, "node_id": node_id}
                for (join_id, use), node_id in uses.items()
                if (join_id, use) not in known
            ]
            if new:
                self._ledger.append(*new)

    def revoke(self, join_id: str, *, made_here: bool = True) -> bool:
        """Revoke the token; return whether it was not revoked before.

        ``made_here``: this file has all tokens. Otherwise another relay may have made this one.

        Raises:
            JoinError: no such token was ever made, or none has such an id.
        """
        if join_id not in self._ledger.read().grants:
            if made_here:
                raise JoinError(f"there is no join token {printable(join_id)!r}: see `relay join-token list`")
            if not _ID.fullmatch(join_id):
                raise JoinError(f"{printable(join_id)!r} is not the id of a join token, its second part")
        return self.revoke_all({digest_of(join_id): self._now_ms()})

    def revoke_all(self, times: Mapping[str, int]) -> bool:
        """Revoke tokens, by the digests of their ids, each at its time; return whether any is new."""
        with self._ledger.locked() as state:
            ids = {digest_of(join_id): join_id for join_id in state.grants}
            new = [
                {"action": "revoke", "ts_ms": at, "id": ids[token]}
                if token in ids
                else {"action": "revoke_other", "ts_ms": at, "token": token}
                for token, at in sorted(times.items())
                if token not in state.revoked
            ]
            if new:
                self._ledger.append(*new)
        return bool(new)

    def revoked(self) -> Mapping[str, int]:
        """Return when each token was revoked, in ms since 1970, by the digest of its id."""
        return self._ledger.read().revoked

    def all(self) -> list[JoinGrant]:
        """Return every token that was ever made, oldest first."""
        return list(self._ledger.read().grants.values())
