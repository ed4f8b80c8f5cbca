"""What the CA of a fleet has issued to nodes, as its relays have it in common.

The relay with the CA's key shares its leaves and takes none: whom it issues to, it decides by its own ledger
alone. The others take them, to revoke a node by its id, to list it, and to know that it is enrolled; a leaf
admits no node, because nodes are verified by their certificates. Must not share join tokens, nor their ids.
"""

from collections.abc import Callable, Container, Mapping
from itertools import islice

from relay.ledger import Entry
from relay.pki.ca_ledger import CaLedger
from relay.pki.records import CaRecords, IssuedLeaf
from relay.shared_ledger import AT_ONCE


class SharedLeaves:
    """A ``relay.shared_ledger.SharedLedger`` in the CA's ledger. ``issues``: the CA's key is here."""

    kind = "leaf"
    ordered = False

    def __init__(self, ledger: CaLedger, now_ms: Callable[[], int], *, issues: bool) -> None:
        self._ledger = ledger
        self._now_ms = now_ms
        self._issues = issues

    def key_of(self, entry: Entry) -> str:
        """Return the kid of the leaf."""
        return str(entry["kid"])

    def end_ms_of(self, entry: Entry) -> int:
        """Return when the leaf expires."""
        return int(entry["not_after_ms"])

    def settle(self, arrived: Mapping[str, Entry], known: Container[str]) -> Mapping[str, Entry]:
        """Record the leaves that were issued elsewhere, or return those that were issued here."""
        records = self._ledger.read()
        if self._issues:
            now = self._now_ms()
            leaves = (each for each in records.issued.values() if isinstance(each, IssuedLeaf))
            lacking = (leaf for leaf in leaves if leaf.kid not in known and leaf.not_after_ms > now)
            return {leaf.kid: _shared(leaf) for leaf in islice(lacking, AT_ONCE)}
        if arrived.keys() - records.issued.keys():
            with self._ledger.locked() as records:
                self._ledger.append(*(leaf.entry() for leaf in _new(records, arrived)))
        return {}


def _new(records: CaRecords, arrived: Mapping[str, Entry]) -> list[IssuedLeaf]:
    """Return the leaves that are not in the ledger, in the order in which they were issued."""
    leaves = [_leaf(entry) for kid, entry in arrived.items() if kid not in records.issued]
    return sorted(leaves, key=lambda leaf: leaf.issued_ms)


def _shared(leaf: IssuedLeaf) -> Entry:
    entry: Entry = {
        "kid": leaf.kid,
        "node_id": leaf.node_id,
        "tenant": leaf.tenant,
        "public_key": leaf.public_key.hex(),
        "issued_ms": leaf.issued_ms,
        "not_after_ms": leaf.not_after_ms,
    }
    return entry | ({"serial": f"{leaf.serial:x}"} if leaf.serial else {})


def _leaf(entry: Entry) -> IssuedLeaf:
    return IssuedLeaf(
        node_id=entry["node_id"],
        tenant=entry["tenant"],
        kid=entry["kid"],
        public_key=bytes.fromhex(entry["public_key"]),
        serial=int(entry.get("serial", "0"), 16),
        not_after_ms=entry["not_after_ms"],
        issued_ms=entry["issued_ms"],
    )
