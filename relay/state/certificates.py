"""The entries of the CA's ledger, and their sum: the certificates, their holders, and which are revoked.

| action | members besides ``ts_ms`` |
|---|---|
| `issue` | `node_id`, `tenant`, `public_key`, `kid`, `serial`, `not_after_ms`, `join_id` if it was enrolled |
| `serve` | `name`, `kid`, `serial`, `not_after_ms`, and `relay` if it is for one without the CA's key |
| `revoke` | `kid`, `reason`, and `node_id` or `name`; by another relay, `serial`, `not_after_ms` instead |
| `rotate` | `root`, `previous`, `previous_until_ms`, and `of`: `servers` if it is their root |

Serial numbers are in hex, since they exceed JSON's numbers. Must not read or write files.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from relay.state.ledger import Entry, LedgerState
from relay.state.merging import LazyEntries, SharedForm
from schemas.identity import certificates_in, issued_as, kid_of
from schemas.text import printable

KID_DIGITS = 16
"""How many digits of a kid are shown to people; enough to be unique."""
_KID = re.compile(rf"[0-9a-f]{{{KID_DIGITS},64}}")
_OLD_LEAF_MS = 90 * 86_400_000
_ELSEWHERE = "revoked at another relay"


@dataclass(frozen=True, slots=True)
class IssuedLeaf:
    """A node's leaf as the ledger records it.

    ``serial`` is 0 for a leaf of the first version, which recorded none: a revocation list cannot name it,
    its kid can. ``join_id`` names the join token that it was enrolled with, if it was.
    """

    node_id: str
    tenant: str
    kid: str
    public_key: bytes
    serial: int
    not_after_ms: int
    issued_ms: int
    join_id: str | None = None

    @property
    def name(self) -> str:
        return self.node_id

    @property
    def not_before_ms(self) -> int:
        return self.issued_ms

    def subject(self) -> dict[str, str]:
        """Return what names it in other entries."""
        return {"node_id": self.node_id, "kid": self.kid}

    def facts(self) -> dict[str, Any]:
        times = {"issued_ms": self.issued_ms, "not_after_ms": self.not_after_ms}
        return self.subject() | {"tenant": self.tenant, **times, "join_id": self.join_id}

    def entry(self) -> dict[str, Any]:
        entry: dict[str, Any] = {
            "action": "issue",
            "ts_ms": self.issued_ms,
            "node_id": self.node_id,
            "tenant": self.tenant,
            "public_key": self.public_key.hex(),
            "kid": self.kid,
            "serial": f"{self.serial:x}",
            "not_after_ms": self.not_after_ms,
        }
        return entry if self.join_id is None else {**entry, "join_id": self.join_id}

    @classmethod
    def of(cls, entry: Mapping[str, Any]) -> "IssuedLeaf":
        issued_ms = int(entry["ts_ms"])
        return cls(
            node_id=str(entry["node_id"]),
            tenant=str(entry["tenant"]),
            kid=str(entry["kid"]),
            public_key=bytes.fromhex(entry["public_key"]),
            serial=int(entry.get("serial", "0"), 16),
            not_after_ms=int(entry.get("not_after_ms", issued_ms + _OLD_LEAF_MS)),
            issued_ms=issued_ms,
            join_id=entry.get("join_id"),
        )


@dataclass(frozen=True, slots=True)
class IssuedServer:
    """A broker's or relay's certificate as the ledger records it.

    ``relay`` names the relay that it was made for, where that is not the one with the CA's key.
    """

    name: str
    kid: str
    serial: int
    not_after_ms: int
    issued_ms: int
    relay: str | None = None

    @property
    def tenant(self) -> None:
        """A server belongs to no tenant."""

    def subject(self) -> dict[str, str]:
        return {"name": self.name, "kid": self.kid}

    def facts(self) -> dict[str, Any]:
        return {**self.subject(), "issued_ms": self.issued_ms, "not_after_ms": self.not_after_ms}

    def entry(self) -> dict[str, Any]:
        entry: dict[str, Any] = {
            "action": "serve",
            "ts_ms": self.issued_ms,
            "name": self.name,
            "kid": self.kid,
            "serial": f"{self.serial:x}",
            "not_after_ms": self.not_after_ms,
        }
        return entry if self.relay is None else {**entry, "relay": self.relay}

    @classmethod
    def of(cls, entry: Mapping[str, Any]) -> "IssuedServer":
        return cls(
            name=str(entry["name"]),
            kid=str(entry["kid"]),
            serial=int(entry["serial"], 16),
            not_after_ms=int(entry["not_after_ms"]),
            issued_ms=int(entry["ts_ms"]),
            relay=entry.get("relay"),
        )


def rotation(root: str, previous: str, previous_until_ms: int, now_ms: int) -> Entry:
    """Return the entry that records another root; both are named by their thumbprints."""
    entry: Entry = {"action": "rotate", "ts_ms": now_ms, "root": root}
    return entry | {"previous": previous, "previous_until_ms": previous_until_ms}


def revocations(held: Sequence[IssuedLeaf | IssuedServer], reason: str, now_ms: int) -> list[Entry]:
    """Return the entries that record revocations; of ``reason``, the first 64 printable characters."""
    entry = {"action": "revoke", "ts_ms": now_ms, "reason": printable(reason, 64)}
    return [entry | each.subject() for each in held]


class CaRecords(LedgerState):
    """The sum of the entries of the CA's ledger."""

    def __init__(self, entries: Iterable[Mapping[str, Any]] = ()) -> None:
        self.issued: dict[str, IssuedLeaf | IssuedServer] = {}
        """By kid, oldest first."""
        self.revoked: dict[str, int] = {}
        """The kids of the revoked, and when that was."""
        self._reported_serials: dict[str, int] = {}
        self._reported_ends_ms: dict[str, int] = {}
        self._moved: dict[str, IssuedLeaf] = {}
        self._of_node: dict[str, tuple[IssuedLeaf, ...]] = {}
        for entry in entries:
            self.apply(entry)

    def apply(self, entry: Mapping[str, Any]) -> None:
        """Apply the next entry.

        Raises:
            KeyError, ValueError, TypeError, AttributeError: it is not one that the CA writes.
        """
        match entry["action"]:
            case "issue":
                leaf = IssuedLeaf.of(entry)
                self.issued[leaf.kid] = leaf
                before = self._of_node.get(leaf.node_id, ())
                self._of_node[leaf.node_id] = (*before, leaf)
                if before and before[-1].tenant != leaf.tenant:
                    self._moved[leaf.kid] = leaf
            case "serve":
                server = IssuedServer.of(entry)
                self.issued[server.kid] = server
            case "revoke":
                kid = str(entry["kid"])
                self.revoked.setdefault(kid, int(entry.get("ts_ms", 0)))
                if "serial" in entry:
                    self._reported_serials[kid] = int(entry["serial"], 16)
                if "not_after_ms" in entry:
                    self._reported_ends_ms[kid] = int(entry["not_after_ms"])
            case "rotate":
                pass
            case other:
                raise ValueError(other)

    def state(self, issued: IssuedLeaf | IssuedServer, now_ms: int) -> str:
        if issued.kid in self.revoked:
            return "revoked"
        return "in force" if now_ms < issued.not_after_ms else "expired"

    def leaf_kids(self) -> Iterator[str]:
        """Yield the kid of every leaf, oldest first."""
        return (kid for kid, issued in self.issued.items() if isinstance(issued, IssuedLeaf))

    def was_issued(self, node_id: str) -> bool:
        """Return whether the id was ever issued: then it belongs to a key, even a revoked one."""
        return node_id in self._of_node

    def leaves_of(self, node_id: str) -> Sequence[IssuedLeaf]:
        return self._of_node.get(node_id, ())

    def may_replace(self, node_id: str, join_id: str, replaces: str) -> bool:
        """Return whether a join token, which ``replaces`` a node, gives the id away again: it does so once.

        Else a node that was revoked would come back with its old token.
        """
        return replaces == node_id and all(leaf.join_id != join_id for leaf in self.leaves_of(node_id))

    def tenants(self) -> dict[str, str]:
        """Return every node that there ever was, and the tenant of its newest leaf."""
        return {node_id: leaves[-1].tenant for node_id, leaves in self._of_node.items()}

    def unrevoked(self, node_id: str) -> list[IssuedLeaf]:
        return [leaf for leaf in self._of_node.get(node_id, ()) if leaf.kid not in self.revoked]

    def enrolled_tenant(self, node_id: str) -> str | None:
        """Return the tenant of the node's newest leaf that is not revoked; None if it has none."""
        held = self.unrevoked(node_id)
        return held[-1].tenant if held else None

    def tenant_of(self, node_id: str) -> str | None:
        """Return the tenant of the node's newest leaf, revoked or not; None if there never was one."""
        return next((leaf.tenant for leaf in self.leaves_of(node_id)[-1:]), None)

    def moved_leaves(self) -> Mapping[str, IssuedLeaf]:
        """Return, by kid, each leaf that is for another tenant than the same node's leaf before it."""
        return self._moved

    def retired_nodes(self) -> frozenset[str]:
        """Return the nodes all of whose leaves are revoked."""
        found = (self.issued.get(kid) for kid in self.revoked)
        nodes = {each.node_id for each in found if isinstance(each, IssuedLeaf)}
        return frozenset(node_id for node_id in nodes if not self.unrevoked(node_id))

    def in_force(self) -> dict[str, IssuedLeaf]:
        """Return the newest leaf of each node that has one that is not revoked."""
        leaves = {node_id: self.unrevoked(node_id) for node_id in self._of_node}
        return {node_id: held[-1] for node_id, held in leaves.items() if held}

    def find(self, target: str) -> list[IssuedLeaf | IssuedServer] | None:
        """Return what is unrevoked of a node, or of a kid or its first 16 digits; None if that is unknown."""
        if self.was_issued(target):
            return [*self.unrevoked(target)]
        found = [kid for kid in self.issued if kid.startswith(target)] if _KID.fullmatch(target) else []
        if len(found) != 1:
            return None
        return [self.issued[kid] for kid in found if kid not in self.revoked]

    def of_relay(self, name: str) -> list[IssuedServer]:
        """Return all that was issued to the relay of that name; nothing if there never was one."""
        servers = [each for each in self.issued.values() if isinstance(each, IssuedServer)]
        return [each for each in servers if name in {each.name, each.relay}]

    def revoked_as(self, roots: Iterable[str]) -> frozenset[str]:
        """Return issuer and serial number of every revoked certificate, for each of ``roots`` (PEM).

        Serial numbers are random, so the root that did not issue it loses nothing.
        """
        kids = [kid_of(der) for root in roots for der in certificates_in(root)[:1]]
        return frozenset(issued_as(kid, serial) for kid in kids for serial in self.revoked_serials())

    def revoked_serials(self) -> list[int]:
        return [serial for serial in map(self.serial_of, self.revoked) if serial]

    def serial_of(self, kid: str) -> int:
        issued = self.issued.get(kid)
        return issued.serial if issued is not None else self._reported_serials.get(kid, 0)

    def end_ms_of(self, kid: str) -> int | None:
        """Return when a certificate expires, in ms since 1970; None if that is not on record."""
        issued = self.issued.get(kid)
        return issued.not_after_ms if issued is not None else self._reported_ends_ms.get(kid)


# --- as the relays of a fleet have them in common ------------------------------------------------------


def _shared_revocation(records: CaRecords, kid: str) -> Entry:
    """Return an entry that is complete in itself: no other relay has to know the certificate.

    The reason is not shared: it is a person's free text.
    """
    entry: Entry = {"kid": kid, "revoked_ms": records.revoked[kid]}
    if serial := records.serial_of(kid):
        entry["serial"] = f"{serial:x}"
    if (end_ms := records.end_ms_of(kid)) is not None:
        entry["not_after_ms"] = end_ms
    return entry


def _revocation_line(_records: CaRecords, entry: Entry, _now_ms: int) -> Entry:
    kept = {"action": "revoke", "ts_ms": entry["revoked_ms"], "kid": entry["kid"], "reason": _ELSEWHERE}
    return kept | {name: entry[name] for name in ("serial", "not_after_ms") if name in entry}


def _shared_leaf(records: CaRecords, kid: str) -> Entry:
    """Return an entry without the join token's id, which is for the relay that enrols alone."""
    line = records.issued[kid].entry()
    shared = {name: line[name] for name in ("kid", "node_id", "tenant", "public_key", "not_after_ms")}
    serial = {} if line["serial"] == "0" else {"serial": line["serial"]}
    return shared | {"issued_ms": line["ts_ms"]} | serial


def _leaf_line(_records: CaRecords, entry: Entry, _now_ms: int) -> Entry:
    return IssuedLeaf.of(entry | {"ts_ms": entry["issued_ms"]}).entry()


REVOCATIONS = SharedForm(
    key_of=lambda entry: str(entry["kid"]),
    entries=lambda records: LazyEntries(records.revoked, lambda kid: _shared_revocation(records, kid)),
    has=lambda records, entry: entry["kid"] in records.revoked,
    line=_revocation_line,
    # Once the certificate has expired it is not shared any more, and stays in the file.
    end_ms_of=lambda entry: entry.get("not_after_ms"),
)
LEAVES = SharedForm(
    key_of=lambda entry: str(entry["kid"]),
    entries=lambda records: LazyEntries(records.leaf_kids(), lambda kid: _shared_leaf(records, kid)),
    has=lambda records, entry: entry["kid"] in records.issued,
    line=_leaf_line,
    end_ms_of=lambda entry: int(entry["not_after_ms"]),
)
