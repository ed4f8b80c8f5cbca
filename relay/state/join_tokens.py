"""The join tokens that the operator made: how many nodes may still enrol with one, and into which tenant.

| action | members besides ``ts_ms`` |
|---|---|
| `create` | `id`, `tenant`, `key`, `expires_at_ms`, `uses`; if given, `label`, `replaces`, `tags` |
| `spend` | `id`, `node_id` |
| `count` | `id`, `use`, `node_id`: which node's this use is, of 1 and more, for all relays of the fleet |
| `revoke` | `id` |
| `revoke_other` | `token`: the digest of the id of a token that this file does not have |

The file holds the tokens' keys, so it is for its owner alone. Of a token that another relay of the fleet has
made it can say one thing, that it is revoked. Other relays know a token by the digest of its id alone.
Must not judge proofs, must not issue, and must not know what a label or a tag may be.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from hashlib import sha256
from pathlib import Path
from typing import Any

from relay.state.ledger import Entry, Ledger, LedgerState
from relay.state.merging import LazyEntries, SharedForm
from schemas.certificates import UNENROLLED_TENANT
from schemas.enrolment import JoinToken
from schemas.error_roots import OperatorError, PeerError
from schemas.identity import TENANT_PATTERN, first_certificate_in
from schemas.keys import base64url, from_base64url
from schemas.labels import kept_form, look_of, shown_form
from schemas.text import quoted
from schemas.times import SystemClock
from schemas.ulids import UlidSource

KEY_BYTES = 32
MAX_TTL_S = 30 * 86_400
MAX_USES = 10_000
_DIGEST = re.compile(r"[0-9a-f]{64}")
_ID = re.compile(r"[0-9A-HJKMNP-TV-Z]{26}")


class JoinError(OperatorError):
    """A join token is not made, or not known; the text says why."""


class JoinRefusedError(PeerError):
    """A node may not enrol with this join token."""


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
        if not self.counted:
            return len(self.node_ids)
        return len({*self.node_ids, *(node_id for _, node_id in self.counted)})

    def numbered_uses(self) -> list[tuple[int, str]]:
        """Return every use: what is counted, and then one that is free for each node that has none."""
        counted = dict(self.counted)
        holders = set(counted.values())
        free = (use for use in range(1, self.uses + 1) if use not in counted)
        waiting = (node_id for node_id in self.node_ids if node_id not in holders)
        return [*counted.items(), *zip(free, waiting, strict=False)]

    def state(self, now_ms: int) -> JoinState:
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


class JoinGrants(LedgerState):
    """The grants that the entries add up to, by id.

    Attributes:
        revoked: when each token was revoked, in ms since 1970, by the digest of its id. Tokens that other
            relays have made are among them.
    """

    def __init__(self) -> None:
        self.grants: dict[str, JoinGrant] = {}
        self.revoked: dict[str, int] = {}
        self._ids: dict[str, str] = {}

    def id_of(self, token: str) -> str | None:
        """Return the id of the token of that digest; None if it was not made here."""
        return self._ids.get(token)

    def giver_of(self, tenant: str, label: str, now_ms: int) -> str | None:
        """Return the token that can still give ``label`` to a node of ``tenant``."""
        for grant in self.grants.values():
            same = grant.tenant == tenant and look_of(grant.label) == look_of(label)
            if same and grant.state(now_ms) is JoinState.OPEN:
                return grant.id
        return None

    def apply(self, entry: Entry) -> None:
        match entry["action"]:
            case "create":
                self.grants[entry["id"]] = JoinGrant(
                    id=entry["id"],
                    tenant=str(entry["tenant"]),
                    key=_key(entry["key"]),
                    created_ms=int(entry["ts_ms"]),
                    expires_at_ms=int(entry["expires_at_ms"]),
                    uses=int(entry["uses"]),
                    label=shown_form(str(entry.get("label", ""))),
                    tags=tuple(map(str, entry.get("tags", ()))),
                    replaces=str(entry.get("replaces", "")),
                )
                self._ids[digest_of(entry["id"])] = entry["id"]
            case "spend":
                grant = self.grants[entry["id"]]
                self.grants[grant.id] = replace(grant, node_ids=(*grant.node_ids, str(entry["node_id"])))
            case "count":
                grant, use = self.grants[entry["id"]], (int(entry["use"]), str(entry["node_id"]))
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


class JoinTokens:
    """The join tokens in ``path``. Time and randomness are arguments.

    Everything raises LedgerError if the file is damaged, and OSError if it cannot be used.
    """

    def __init__(self, path: Path, now_ms: SystemClock, random_bytes: Callable[[int], bytes]) -> None:
        self.ledger = Ledger(path, JoinGrants(), secret=True)
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
        replaces: str = "",
    ) -> JoinToken:
        """Make a token for ``uses`` nodes; it pins ``root_pem`` as the root of this relay's CA.

        ``label`` and ``tags`` are of their form, and no node of the tenant has the label. ``replaces`` is the
        id of a node that enrols again.

        Raises:
            JoinError: tenant, time or number are out of bounds, or another token gives the label.
        """
        if not re.fullmatch(TENANT_PATTERN, tenant) or tenant == UNENROLLED_TENANT:
            raise JoinError(f"{quoted(tenant)} is not a tenant: use a-z, 0-9, - and _")
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
        with self.ledger.locked() as state:
            if label and (holder := state.giver_of(tenant, label, now)) is not None:
                raise JoinError(
                    f"join token {holder} gives the label {label!r}: revoke it, or choose another"
                )
            given = {"label": kept_form(label) if label else "", "tags": list(tags), "replaces": replaces}
            self.ledger.append(entry | {name: value for name, value in given.items() if value})
        return token

    def find(self, join_id: str) -> JoinGrant | None:
        """Return what the token allows; None if it is unknown, expired or revoked.

        A token that is used up is returned, for a node that lost the answer: see ``spend``.
        """
        grant = self.ledger.read().grants.get(join_id)
        dead = grant is None or grant.state(self._now_ms()) in {JoinState.EXPIRED, JoinState.REVOKED}
        return None if dead else grant

    def spend(self, join_id: str, node_id: str) -> None:
        """Count ``node_id``, once, against the uses of the token.

        Raises:
            JoinRefusedError: the token is unknown, expired, revoked, or used up by others.
        """
        with self.ledger.locked() as state:
            grant = state.grants.get(join_id)
            if grant is None or not grant.admits(node_id, self._now_ms()):
                raise JoinRefusedError("the join token is not good for another node")
            if node_id not in grant.node_ids:
                now = self._now_ms()
                self.ledger.append({"action": "spend", "ts_ms": now, "id": join_id, "node_id": node_id})

    def revoke(self, join_id: str, *, made_here: bool = True) -> bool:
        """Revoke the token; return whether it was not revoked before.

        ``made_here``: this file has all tokens. Otherwise another relay may have made this one.

        Raises:
            JoinError: no such token was ever made, or none has such an id.
        """
        if join_id not in self.ledger.read().grants:
            if made_here:
                raise JoinError(f"there is no join token {quoted(join_id)}: see `relay join-token list`")
            if not _ID.fullmatch(join_id):
                raise JoinError(f"{quoted(join_id)} is not the id of a join token, its second part")
        with self.ledger.locked() as state:
            is_new = digest_of(join_id) not in state.revoked
            if is_new:
                self.ledger.append(_revocation(state, digest_of(join_id), self._now_ms()))
        return is_new

    def all(self) -> list[JoinGrant]:
        return list(self.ledger.read().grants.values())


# --- as the relays of a fleet have them in common ------------------------------------------------------


def _revocation(state: JoinGrants, token: str, at_ms: int) -> Entry:
    """Return the line that revokes the token of that digest: by its id if this file has it."""
    join_id = state.id_of(token)
    if join_id is None:
        return {"action": "revoke_other", "ts_ms": at_ms, "token": token}
    return {"action": "revoke", "ts_ms": at_ms, "id": join_id}


def _grant_of(state: JoinGrants, entry: Entry) -> JoinGrant | None:
    """Return the token that a use is of, while it counts: it is in this file, and not revoked."""
    join_id = state.id_of(entry["token"])
    grant = None if join_id is None else state.grants[join_id]
    return None if grant is None or grant.revoked or entry["use"] > grant.uses else grant


def _has_use(state: JoinGrants, entry: Entry) -> bool:
    grant = _grant_of(state, entry)
    return grant is None or entry["use"] in dict(grant.counted)


def _use_line(state: JoinGrants, entry: Entry, now_ms: int) -> Entry:
    """Return the line that counts a use: that node may not enrol with it here for that."""
    line = {"action": "count", "ts_ms": now_ms, "id": state.id_of(entry["token"])}
    return line | {"use": entry["use"], "node_id": entry["node_id"]}


def _all_uses(state: JoinGrants) -> Mapping[str, Entry]:
    """Return every use of a token that is not revoked, whose number is its own or the next free one."""
    uses = {}
    for grant in state.grants.values():
        if grant.revoked:
            continue
        token = digest_of(grant.id)
        for use, node_id in grant.numbered_uses():
            entry = {"token": token, "use": use, "node_id": node_id, "expires_at_ms": grant.expires_at_ms}
            uses[_use_key(entry)] = entry
    return uses


def _use_key(entry: Entry) -> str:
    return f"{entry['token']}-{entry['use']}"


JOIN_TOKEN_REVOCATIONS = SharedForm(
    key_of=lambda entry: str(entry["token"]),
    entries=lambda state: LazyEntries(
        state.revoked, lambda token: {"token": token, "revoked_ms": state.revoked[token]}
    ),
    has=lambda state, entry: entry["token"] in state.revoked,
    line=lambda state, entry, _now_ms: _revocation(state, entry["token"], entry["revoked_ms"]),
    # A token that was made before it was revoked has expired by then in any case.
    end_ms_of=lambda entry: int(entry["revoked_ms"]) + MAX_TTL_S * 1000,
)
JOIN_TOKEN_USES = SharedForm(
    key_of=_use_key,
    entries=_all_uses,
    has=_has_use,
    line=_use_line,
    end_ms_of=lambda entry: int(entry["expires_at_ms"]),
    holder_takes=True,
)
