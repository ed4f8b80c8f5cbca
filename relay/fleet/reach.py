"""The nodes that a caller reaches: those of its tenant, or of these the ones that its token is for.

Every look-up for an agent passes here: by id or by name, page by page, all of them. So lists, views,
resources, streams and sessions agree, and what is outside does not exist, in errors and close names as well.
Must not decide what a token is for: that is ``relay.auth.permissions``.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator
from itertools import islice

from attrs import define, field

from relay.auth.permissions import Rights
from relay.fleet.node_index import FleetChange, NodeIndex
from relay.fleet.node_names import NodeNames
from relay.fleet.node_record import NodeRecord

_KEPT = 32
"""Of how many callers with different rights the ids are kept; of more, those asked last."""


@define(eq=False, repr=False)
class Reach:
    """The look-ups of callers in one fleet, each by the rights of one. ``names`` are those of all nodes."""

    _nodes: NodeIndex
    names: NodeNames
    _kept: OrderedDict[Rights, tuple[tuple[int, int], frozenset[str]]] = field(
        init=False, factory=OrderedDict
    )

    def admits(self, rights: Rights, node_id: str) -> bool:
        """Return whether a node of their tenant is one of those that ``rights`` are for."""
        # Each call asks: most tokens are for every node, and no name is looked up.
        return rights.nodes is None or rights.admit_node(node_id, self.names.name_of(node_id))

    def ids(self, rights: Rights) -> frozenset[str] | None:
        """Return the ids of all nodes that ``rights`` reach; None if these are all of the tenant."""
        if rights.nodes is None:
            return None
        revision = self.names.revision(rights.tenant), self._nodes.ids_revision(rights.tenant)
        kept = self._kept.get(rights)
        if kept is None or kept[0] != revision:
            reached = filter(self._admitting(rights), self._nodes.ids_of(rights.tenant))
            kept = self._kept[rights] = revision, frozenset(reached)
        self._kept.move_to_end(rights)
        if len(self._kept) > _KEPT:
            self._kept.popitem(last=False)
        return kept[1]

    def node(self, rights: Rights, node_id: str) -> NodeRecord | None:
        node = self._nodes.of_tenant(rights.tenant).get(node_id)
        return node if node is not None and self.admits(rights, node_id) else None

    def behind(self, rights: Rights, after: str, limit: int) -> list[NodeRecord]:
        """Return the nodes that lists show: ``limit`` of those behind the id ``after``."""
        ids = self.ids(rights)
        if ids is None:
            return self._nodes.behind(rights.tenant, after, limit)
        nodes = self._nodes.behind(rights.tenant, after, None)
        return list(islice((node for node in nodes if node.node_id in ids), limit))

    def labels(self, rights: Rights) -> Iterator[tuple[str, str]]:
        """Yield label and id of the nodes that lists show, sorted without case."""
        return (
            (label, node_id)
            for label, node_id in self.names.labels(rights.tenant)
            if node_id not in self._nodes.hidden and self.admits(rights, node_id)
        )

    def resolve(self, rights: Rights, reference: str) -> str:
        """Return the id of the node that ``reference`` names, as ``NodeNames.resolve`` describes."""
        return self.names.resolve(rights.tenant, reference, self._admitting(rights))

    def members(self, rights: Rights, selector: str) -> list[str]:
        """Return the ids of the nodes that ``selector`` means, as ``NodeNames.members`` describes."""
        return self.names.members(rights.tenant, selector, self._admitting(rights))

    def changes(self, rights: Rights, since_ms: int) -> list[FleetChange]:
        changes = self._nodes.changes.since(rights.tenant, since_ms)
        return [change for change in changes if self.admits(rights, change.node_id)]

    def _admitting(self, rights: Rights) -> Callable[[str], bool]:
        return lambda node_id: self.admits(rights, node_id)
