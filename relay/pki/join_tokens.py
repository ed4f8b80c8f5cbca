"""The join tokens that the operator made: how many nodes may still enrol with one, and into which tenant.

| action | members besides ``ts_ms`` and ``id`` |
|---|---|
| `create` | `tenant`, `key`, `expires_at_ms`, `uses`, `label` (one use alone) and `tags` if there are any |
| `spend` | `node_id` |
| `count` | `use`, `node_id`: which node's this use is, of 1 and more, for all relays of the fleet |
| `revoke` | |

The file holds the tokens' keys, so it is for its owner alone. Must not judge proofs, must not issue, and must
not know what a label or a tag may be.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from hashlib import sha256
from pathlib import Path
from typing import Any

from relay.ledger import Entry, Ledger
from schemas.certificates import UNENROLLED_TENANT
from schemas.enrolment import JoinToken
from schemas.error_roots import OperatorError, PeerError
from schemas.identity import TENANT_PATTERN, certificates_in
from schemas.keys import base64url, from_base64url
from schemas.text import printable
from schemas.ulids import UlidSource

MAX_TTL_S = 30 * 86_400
MAX_USES = 10_000
_KEY_BYTES = 32


class JoinError(OperatorError):
    """A join token is not made, or not known; the text says why."""


class JoinRefusedError(PeerError):
    """A node may not enrol with this join token."""


class JoinState(StrEnum):
    """The state of a join token."""

    OPEN = "open"
    USED_UP = "used up"
    EXPIRED = "expired"
    REVOKED = "revoked"


@dataclass(frozen=True, slots=True)
class JoinGrant:
    """What a join token allows, and the names that it gives.

    Attributes:
        label: of the one node that enrols with it; empty if none.
        tags: of every node that enrols with it.
        node_ids: the nodes that enrolled with it at this relay, oldest first.
        counted: the uses that the relays of the fleet have counted, and of which node each is.
    """

    id: str
    tenant: str
    key: bytes = field(repr=False)
    created_ms: int
    expires_at_ms: int
    uses: int
    label: str = ""
    tags: tuple[str, ...] = ()
    node_ids: tuple[str, ...] = ()
    counted: tuple[tuple[int, str], ...] = ()
    revoked: bool = False

    @property
    def used(self) -> int:
        """How many nodes have used it."""
        if not self.counted:
            return len(self.node_ids)
        return len({*self.node_ids, *(node_id for _, node_id in self.counted)})

    def state(self, now_ms: int) -> JoinState:
        """Return its state at ``now_ms``."""
        if self.revoked:
            return JoinState.REVOKED
        if now_ms >= self.expires_at_ms:
            return JoinState.EXPIRED
        return JoinState.OPEN if self.used < self.uses else JoinState.USED_UP

    def facts(self, now_ms: int) -> dict[str, Any]:
        """Return it for programs, without its key."""
        return {
            "id": self.id,
            "tenant": self.tenant,
            "created_ms": self.created_ms,
            "expires_at_ms": self.expires_at_ms,
            "uses": self.uses,
            "used": self.used,
            "label": self.label or None,
            "tags": list(self.tags),
            "node_ids": list(self.node_ids),
            "state": self.state(now_ms),
        }

    def admits(self, node_id: str, now_ms: int) -> bool:
        """Return whether ``node_id`` may enrol with it, or again: answers can be lost."""
        state = self.state(now_ms)
        return state is JoinState.OPEN or (state is JoinState.USED_UP and node_id in self.node_ids)


class _Grants:
    """The grants that the entries add up to, by id."""

    def __init__(self) -> None:
        self.grants: dict[str, JoinGrant] = {}

    def copy(self) -> "_Grants":
        other = _Grants()
        other.grants = self.grants.copy()
        return other

    def giver_of(self, tenant: str, label: str, now_ms: int) -> str | None:
        """Return the token that can still give ``label`` to a node of ``tenant``."""
        for grant in self.grants.values():
            same = grant.tenant == tenant and grant.label.lower() == label.lower()
            if same and grant.state(now_ms) is JoinState.OPEN:
                return grant.id
        return None

    def apply(self, entry: Entry) -> None:
        join_id = entry["id"]
        match entry["action"]:
            case "create":
                self.grants[join_id] = JoinGrant(
                    id=join_id,
                    tenant=str(entry["tenant"]),
                    key=_key(entry["key"]),
                    created_ms=int(entry["ts_ms"]),
                    expires_at_ms=int(entry["expires_at_ms"]),
                    uses=int(entry["uses"]),
                    label=str(entry.get("label", "")),
                    tags=tuple(map(str, entry.get("tags", ()))),
                )
            case "spend":
                grant = self.grants[join_id]
                self.grants[join_id] = replace(grant, node_ids=(*grant.node_ids, str(entry["node_id"])))
            case "count":
                grant = self.grants[join_id]
                use = (int(entry["use"]), str(entry["node_id"]))
                self.grants[join_id] = replace(grant, counted=(*grant.counted, use))
            case "revoke":
                self.grants[join_id] = replace(self.grants[join_id], revoked=True)
            case other:
                raise ValueError(other)


class JoinTokens:
    """The join tokens in ``path``. Time and randomness are arguments.

    Everything raises LedgerError if the file is damaged, and OSError if it cannot be used.
    """

    def __init__(self, path: Path, now_ms: Callable[[], int], random_bytes: Callable[[int], bytes]) -> None:
        self._ledger = Ledger(path, _Grants(), secret=True)
        self._now_ms = now_ms
        self._random_bytes = random_bytes
        self._ulids = UlidSource(now_ms, random_bytes)

    def create(  # noqa: PLR0913, PLR0917 - what a token is made of
        self,
        tenant: str,
        ttl_s: int,
        uses: int,
        root_pem: str,
        label: str = "",
        tags: Sequence[str] = (),
    ) -> JoinToken:
        """Make a token for ``uses`` nodes; it pins ``root_pem`` as the root of this relay's CA.

        ``label`` and ``tags`` are of their form, and no node of the tenant has the label.

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
        key = self._random_bytes(_KEY_BYTES)
        token = JoinToken(self._ulids.new(), key, sha256(certificates_in(root_pem)[0]).digest())
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
            self._ledger.append(
                entry | ({"label": label} if label else {}) | ({"tags": list(tags)} if tags else {})
            )
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
                self._append("spend", join_id, node_id=node_id)

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

    def revoke(self, join_id: str) -> bool:
        """Revoke the token; return whether it was not revoked before.

        Raises:
            JoinError: no such token was ever made.
        """
        with self._ledger.locked() as state:
            grant = state.grants.get(join_id)
            if grant is None:
                raise JoinError(f"there is no join token {printable(join_id)!r}: see `relay join-token list`")
            if not grant.revoked:
                self._append("revoke", join_id)
            return not grant.revoked

    def all(self) -> list[JoinGrant]:
        """Return every token that was ever made, oldest first."""
        return list(self._ledger.read().grants.values())

    def _append(self, action: str, join_id: str, **facts: str) -> None:
        self._ledger.append({"action": action, "ts_ms": self._now_ms(), "id": join_id, **facts})


def _key(text: str) -> bytes:
    key = from_base64url(text)
    if len(key) != _KEY_BYTES:
        # An empty key would be known to everyone.
        raise ValueError("not a key")
    return key
