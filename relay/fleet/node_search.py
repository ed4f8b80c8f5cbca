"""Finds the nodes of a tenant by what they are called, offer and are: ranked.

The order is that of ``name_search`` and depends on names and ids alone, so that pages fit together while
nodes connect and disconnect. Must not decide who may search.
"""

from collections.abc import Collection
from dataclasses import dataclass

from relay.fleet.name_search import NameSearch
from relay.fleet.node_index import NodeIndex
from relay.fleet.node_names import NodeNames
from relay.fleet.node_record import NodeRecord
from relay.fleet.selection import WHOLE_FLEET, Selection, by_key


@dataclass(frozen=True, slots=True)
class NodeCriteria:
    """What a node must fit.

    Attributes:
        query: words of its label or its tags, or the beginning of its id; no words mean any.
        kinds: the names of kinds of which it must announce one; empty: it need not.
        tags: those that it must have; of several values of one key, one.
        online: whether it must be connected, or must not; None: either.
        selection: what the caller's URL narrows the fleet to.
    """

    query: str = ""
    kinds: frozenset[str] = frozenset()
    tags: Collection[str] = ()
    online: bool | None = None
    selection: Selection = WHOLE_FLEET


class NodeSearch:
    """Searches ``nodes``, by ``names`` too."""

    def __init__(self, nodes: NodeIndex, names: NodeNames) -> None:
        self._nodes = nodes
        self._names = names
        self._by_name = NameSearch(names)

    def size(self, tenant: str) -> int:
        """Return how many nodes a search in ``tenant`` reads."""
        return len(self._nodes.of_tenant(tenant))

    def found(self, tenant: str, wanted: NodeCriteria) -> list[NodeRecord]:
        """Return the nodes of ``tenant`` that are ``wanted``, best first. Retired ones are not found.

        Raises:
            UnknownNodeError: the selection names a node or a tag that there is not.
        """
        nodes, retired = self._nodes.of_tenant(tenant), self._nodes.retired
        ranked = self._by_name.ranked(tenant, self._nodes.ids_of(tenant), wanted.query)
        found = [nodes[node_id] for node_id in ranked if node_id in nodes and node_id not in retired]
        selected = wanted.selection.node_ids(self._names, tenant)
        if selected is not None:
            found = [node for node in found if node.node_id in selected]
        if wanted.kinds:
            found = [node for node in found if not wanted.kinds.isdisjoint(node.kinds)]
        for tags in by_key(wanted.tags):
            tagged = set[str]().union(*(self._names.tagged(tenant, tag) for tag in tags))
            found = [node for node in found if node.node_id in tagged]
        if wanted.online is not None:
            found = [node for node in found if node.connected is wanted.online]
        return found
