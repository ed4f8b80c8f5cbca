"""The labels and tags of nodes, as the relays of a fleet have them in common.

A label is unique in its tenant, so these entries have an order: that of the stream. Of two names of one node
the later one counts. Of two nodes that were given one label at two relays at once, the first one has it: the
other relay takes it from its own node again. Must not decide what a label may be.
"""

from collections.abc import Container, Mapping
from dataclasses import replace
from itertools import islice

from structlog.typing import FilteringBoundLogger

from relay.fleet.name_ledger import NameLedger, Names, NodeName, name_in
from relay.ledger import Entry
from relay.shared_ledger import AT_ONCE


class SharedNames:
    """A ``relay.shared_ledger.SharedLedger`` of ``names``."""

    kind = "name"
    ordered = True

    def __init__(self, names: NameLedger, log: FilteringBoundLogger) -> None:
        self._names = names
        self._log = log

    def key_of(self, entry: Entry) -> str:
        """Return the id of the node.

        Raises:
            ValueError: its label or a tag is none.
        """
        _said_in(entry)
        return str(entry["node_id"])

    def end_ms_of(self, _entry: Entry) -> None:
        """It never ends: a node that was forgotten stays so."""

    def settle(self, arrived: Mapping[str, Entry], known: Container[str]) -> Mapping[str, Entry]:
        """Name nodes as at other relays; return the names that were given here and are not known there."""
        if arrived:
            with self._names.locked() as names:
                if lines := self._lines(names.copy(), arrived):
                    self._names.write(lines)
        names = self._names.read()
        missing: dict[str, NodeName | None] = dict.fromkeys(
            node_id for node_id in names.forgotten if node_id not in known
        )
        missing |= {node_id: said for node_id, said in names.by_node.items() if node_id not in known}
        missing |= names.unshared
        return {node_id: _shared(node_id, said) for node_id, said in islice(missing.items(), AT_ONCE)}

    def _lines(self, draft: Names, arrived: Mapping[str, Entry]) -> list[Entry]:
        """Return what is to be written; ``draft`` are the names before, and afterwards those that follow."""
        lines: list[Entry] = []

        def write(node_id: str, said: NodeName | None, *, shared: bool) -> None:
            lines.append(self._names.line_of(node_id, said, shared=shared))
            draft.apply(lines[-1])

        for node_id, entry in arrived.items():
            said = _said_in(entry)
            if node_id in draft.unshared:
                # What was decided here and is on its way to the others comes later; or it has come back.
                if draft.unshared[node_id] == said:
                    write(node_id, said, shared=True)
            elif not _is_said(draft, node_id, said):
                holder = draft.holder(said.tenant, said.label) if said is not None and said.label else None
                if holder is not None and holder != node_id:
                    self._log.warning("label taken: another node has it", node_id=holder, other=node_id)
                    unlabelled = replace(draft.by_node[holder], label="")
                    write(holder, unlabelled, shared=holder not in draft.unshared)
                write(node_id, said, shared=True)
        return lines


def _is_said(names: Names, node_id: str, said: NodeName | None) -> bool:
    if said is None or node_id in names.forgotten:
        return said is None and node_id in names.forgotten
    has = names.by_node.get(node_id)
    return has == said if said.label or said.tags else has is None


def _said_in(entry: Entry) -> NodeName | None:
    return None if "forgotten" in entry else name_in(entry)


def _shared(node_id: str, said: NodeName | None) -> Entry:
    if said is None:
        return {"node_id": node_id, "forgotten": True}
    return {
        "node_id": node_id,
        "tenant": said.tenant,
        "label": said.label or None,
        "tags": list(said.tags),
    }
