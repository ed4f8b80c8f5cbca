"""What the entries of the join tokens' file add up to: the tokens, who has used them, and which are revoked.

| action | members besides ``ts_ms`` |
|---|---|
| `create` | `id`, `tenant`, `key`, `expires_at_ms`, `uses`; if given, `label`, `replaces`, `tags` |
| `spend` | `id`, `node_id` |
| `count` | `id`, `use`, `node_id`: which node's this use is, of 1 and more, for all relays of the fleet |
| `revoke` | `id` |
| `revoke_other` | `token`: the digest of the id of a token that this file does not have |

Must not read a file, and must not judge proofs.
"""

import re
from dataclasses import dataclass, field, replace
from enum import StrEnum
from hashlib import sha256
from typing import Any

from relay.ledger import Entry
from schemas.keys import from_base64url

KEY_BYTES = 32
_DIGEST = re.compile(r"[0-9a-f]{64}")


def digest_of(join_id: str) -> str:
    """Return what names a token to other relays, which need not know its id: the SHA-256 of that, in hex."""
    return sha256(join_id.encode("ascii")).hexdigest()


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
        replaces: the id that the one node has which may enrol with it, again and with another key; empty: a
            node enrols with a new id.
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
    replaces: str = ""
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
            "replaces": self.replaces or None,
            "node_ids": list(self.node_ids),
            "state": self.state(now_ms),
        }

    def admits(self, node_id: str, now_ms: int) -> bool:
        """Return whether ``node_id`` may enrol with it, or again: answers can be lost."""
        state = self.state(now_ms)
        return state is JoinState.OPEN or (state is JoinState.USED_UP and node_id in self.node_ids)


class JoinGrants:
    """The grants that the entries add up to, by id.

    Attributes:
        revoked: when each token was revoked, in ms since 1970, by the digest of its id. Tokens that other
            relays have made are among them.
    """

    def __init__(self) -> None:
        self.grants: dict[str, JoinGrant] = {}
        self.revoked: dict[str, int] = {}

    def copy(self) -> "JoinGrants":
        """Return an independent copy."""
        other = JoinGrants()
        other.grants, other.revoked = self.grants.copy(), self.revoked.copy()
        return other

    def giver_of(self, tenant: str, label: str, now_ms: int) -> str | None:
        """Return the token that can still give ``label`` to a node of ``tenant``."""
        for grant in self.grants.values():
            same = grant.tenant == tenant and grant.label.lower() == label.lower()
            if same and grant.state(now_ms) is JoinState.OPEN:
                return grant.id
        return None

    def apply(self, entry: Entry) -> None:
        """Apply the next entry, as ``relay.ledger.LedgerState`` describes."""
        match entry["action"]:
            case "create":
                self.grants[entry["id"]] = JoinGrant(
                    id=entry["id"],
                    tenant=str(entry["tenant"]),
                    key=_key(entry["key"]),
                    created_ms=int(entry["ts_ms"]),
                    expires_at_ms=int(entry["expires_at_ms"]),
                    uses=int(entry["uses"]),
                    label=str(entry.get("label", "")),
                    tags=tuple(map(str, entry.get("tags", ()))),
                    replaces=str(entry.get("replaces", "")),
                )
            case "spend":
                grant = self.grants[entry["id"]]
                self.grants[grant.id] = replace(grant, node_ids=(*grant.node_ids, str(entry["node_id"])))
            case "count":
                grant = self.grants[entry["id"]]
                use = (int(entry["use"]), str(entry["node_id"]))
                self.grants[grant.id] = replace(grant, counted=(*grant.counted, use))
            case "revoke":
                grant = self.grants[entry["id"]]
                self.grants[grant.id] = replace(grant, revoked=True)
                self.revoked[digest_of(grant.id)] = int(entry["ts_ms"])
            case "revoke_other":
                if not _DIGEST.fullmatch(entry["token"]):
                    raise ValueError(entry["token"])
                self.revoked[entry["token"]] = int(entry["ts_ms"])
            case other:
                raise ValueError(other)


def _key(text: str) -> bytes:
    key = from_base64url(text)
    if len(key) != KEY_BYTES:
        # An empty key would be known to everyone.
        raise ValueError("not a key")
    return key
