"""The tools of the nodes that a client's URL selects: listed, offered by kind, and their version.

A list is built from the selected nodes where these are few, and from the index of all tools where they are
many: either way it reads about as much as a page shows. Must not decide what a caller may use.
"""

from collections.abc import Callable, Iterable, Mapping

from relay.auth.permissions import Rights
from relay.fleet.node_index import NodeIndex
from relay.fleet.node_names import NodeNames, UnknownNodeError
from relay.fleet.selection import WHOLE_FLEET, Selection
from relay.fleet.tool_index import SEVERITY, Only, Version
from relay.fleet.tools import BEFORE_ALL, Offer, Position, Tool
from relay.settings.config import View
from schemas.errors import Failure, ToolError
from schemas.projection import ToolName

FEW_NODES = 1000
"""Up to this many nodes, a list is built from them; of more, at least every tenth tool of 10 000 is shown."""


class SelectedTools:
    """The tools of one fleet, by selection."""

    def __init__(self, nodes: NodeIndex, names: NodeNames, now_ms: Callable[[], int]) -> None:
        self._nodes = nodes
        self._names = names
        self._now_ms = now_ms

    def check(self, selection: Selection, name: ToolName | None, tenant: str) -> None:
        """Return if ``selection`` leaves the tool ``name`` of ``tenant`` in; a name that is none is left in.

        Raises:
            ToolError: it does not: as if the node did not exist, or as if it had no such tool.
        """
        if name is None or not selection.is_narrowed:
            return
        if not selection.admits_node(self._names, tenant, name.node_id):
            raise ToolError(Failure.SAFETY_DENIED)
        if not selection.admits_kind(name.kind_short):
            raise ToolError(Failure.NAME_UNKNOWN)

    def listed(
        self,
        rights: Rights,
        selection: Selection = WHOLE_FLEET,
        after: Position = BEFORE_ALL,
        limit: int | None = None,
    ) -> list[Tool]:
        """Return the selected tools that ``rights`` reach, by place: of those behind ``after``, ``limit``.

        Raises:
            UnknownNodeError: the selection names a node or a tag that there is not.
        """
        now_ms = self._now_ms()
        if not selection.is_narrowed:
            return self._nodes.listed(rights, now_ms, after, limit)
        node_ids = selection.node_ids(self._names, rights.tenant)
        if node_ids is not None and len(node_ids) <= FEW_NODES:
            behind = [tool for tool in self._of_nodes(rights, selection, node_ids) if tool.place > after]
            return sorted(behind, key=lambda tool: tool.place)[:limit]
        self._nodes.settle(now_ms)
        return self._nodes.tools.narrowed(rights, Only(selection.kinds, node_ids), after, limit)

    def offered(self, rights: Rights, selection: Selection = WHOLE_FLEET) -> Mapping[Offer, str]:
        """Return the kinds and verbs of the selected tools that ``rights`` reach, with the severest class.

        Raises:
            UnknownNodeError: as ``listed``.
        """
        self._nodes.settle(self._now_ms())
        every = {
            offer: safety_class
            for offer, safety_class in self._nodes.tools.offered(rights).items()
            if selection.admits_kind(offer[0])
        }
        node_ids = selection.node_ids(self._names, rights.tenant)
        if node_ids is None:
            return every
        offered: dict[Offer, str] = {}
        for tool in self._of_nodes(rights, selection, node_ids):
            known = offered.get(tool.offer)
            if known is None or SEVERITY[known] < SEVERITY[tool.safety_class]:
                offered[tool.offer] = tool.safety_class
                if offered == every:
                    break
        return offered

    def version(self, rights: Rights, selection: Selection = WHOLE_FLEET) -> Version:
        """Return a version that differs whenever the selected list does: names, titles, schemas, classes.

        It may differ more often where nodes are selected: then it is that of all nodes and of their names.
        """
        now_ms = self._now_ms()
        if selection.view is View.KINDS:
            try:
                offered = self.offered(rights, selection)
            except UnknownNodeError:
                offered = {}
            return frozenset((f"{kind}.{verb}", SEVERITY[worst]) for (kind, verb), worst in offered.items())
        version = self._nodes.version(rights, now_ms)
        if not selection.has_nodes:
            return version
        return version | {("names", self._names.revision(rights.tenant))}

    def _of_nodes(self, rights: Rights, selection: Selection, node_ids: Iterable[str]) -> Iterable[Tool]:
        self._nodes.settle(self._now_ms())
        nodes = self._nodes.of_tenant(rights.tenant)
        return (
            tool
            for node_id in node_ids
            if node_id in nodes
            for tool in nodes[node_id].indexed_tools.values()
            if rights.allow(rights.tenant, tool.safety_class)
            and selection.admits_kind(tool.surface.kind.short)
        )
