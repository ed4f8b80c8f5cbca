"""Finds the node that an operator means on a command line: by id, label or the beginning of an id.

Unlike an agent, the operator is of no tenant: what fits a node of two tenants is refused. Must not change
anything.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from relay.cli.state import authority, name_ledger
from relay.fleet.node_names import NodeNames, UnknownNodeError
from relay.state.certificates import CaRecords
from relay.state.labels import legible
from relay.state.names import Names
from schemas.error_roots import OperatorError

_MAX_CLOSE = 3


class NodeReferenceError(OperatorError):
    """No node, or more than one, is meant; the text says what to give instead."""


@dataclass(frozen=True, slots=True)
class FoundNode:
    """A node that was ever enrolled, and its tenant."""

    node_id: str
    tenant: str


class NodeDirectory:
    """The nodes of one state directory: those of the CA's ``records``, under the operator's ``names``."""

    def __init__(self, records: CaRecords, names: Names) -> None:
        self.records = records
        self.names = names
        self._tenants = records.tenants()
        ids = defaultdict[str, list[str]](list)
        for node_id in sorted(self._tenants):
            ids[self._tenants[node_id]].append(node_id)
        self._ids = ids
        self.lookup = NodeNames(self)
        self.lookup.change(names.by_node)

    @classmethod
    def of(cls, state_dir: Path | None) -> "NodeDirectory":
        """Return the nodes of that state directory.

        Raises:
            AuthorityStateError, LedgerError, OSError: a ledger is missing, damaged or cannot be read.
        """
        return cls(authority(state_dir).records(), name_ledger(state_dir).read())

    def ids_of(self, tenant: str) -> Sequence[str]:
        """Return the ids of the nodes of ``tenant``, sorted."""
        return self._ids.get(tenant, ())

    def tenant_of(self, node_id: str) -> str | None:
        """Return the tenant of a node; None if there never was one of that id."""
        return self._tenants.get(node_id)

    def find(self, reference: str) -> FoundNode:
        """Return the one node that ``reference`` means in all tenants.

        Raises:
            NodeReferenceError: it means none, or several.
        """
        found: list[FoundNode] = []
        errors: list[UnknownNodeError] = []
        for tenant in sorted(self._ids):
            try:
                found.append(FoundNode(self.lookup.resolve(tenant, reference), tenant))
            except UnknownNodeError as error:
                errors.append(error)
        candidates = len(found) + sum(error.candidates for error in errors)
        if len(found) > 1:
            of = " and ".join(f"{node.node_id} of tenant {node.tenant}" for node in found[:2])
            raise NodeReferenceError(f"'{legible(reference)}' fits {of}: give the id")
        if candidates == 1:
            return found[0]
        close = [name for error in errors for name in error.close][:_MAX_CLOSE]
        raise NodeReferenceError(str(UnknownNodeError(reference, close, candidates)))
