"""What a client's URL selects of the fleet: a view, and some of the nodes, kinds and tags.

It narrows what is listed, what can be called by that URL, and what a search finds. It is no permission: the
same token is good for any URL. Must not read a URL, nor decide what a caller may use.
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass

from attrs import define

from relay.auth.permissions import Rights
from relay.fleet.node_index import NodeIndex
from relay.fleet.node_names import NameSearch, NodeNames, UnknownNodeError
from relay.fleet.node_record import NodeRecord
from relay.fleet.tool_index import SEVERITY, Only, Version
from relay.fleet.tools import BEFORE_ALL, Offer, Position, Tool
from relay.settings.config import View
from relay.state.labels import tag_key
from schemas.errors import Failure, ToolError
from schemas.projection import ToolName

TAG_SELECTOR = "tag:"


@dataclass(frozen=True, slots=True)
class Selection:
    """A view, and what it is narrowed to; an empty member narrows nothing.

    A node must fit one of ``nodes`` and have, of each key in ``tags``, one of its values; a tool must be of
    one of ``kinds``.

    Attributes:
        nodes: ids, labels or prefixes, as the client wrote them.
        kinds: the first tokens of tool names.
        tags: such as ``site=north`` or ``gateway``.
    """

    view: View = View.TOOLS
    nodes: tuple[str, ...] = ()
    kinds: frozenset[str] = frozenset()
    tags: tuple[str, ...] = ()

    @property
    def has_nodes(self) -> bool:
        return bool(self.nodes or self.tags)

    @property
    def is_narrowed(self) -> bool:
        return bool(self.nodes or self.tags or self.kinds)

    def admits_kind(self, kind_short: str) -> bool:
        return not self.kinds or kind_short in self.kinds

    def admits_node(self, names: NodeNames, tenant: str, node_id: str) -> bool:
        """Return whether a node of ``tenant`` is selected. A reference that fits no node selects none."""
        if self.tags and not has_tags(names.tags_of(node_id), self.tags):
            return False
        return not self.nodes or any(_is_named(names, tenant, name, node_id) for name in self.nodes)

    def node_ids(self, names: NodeNames, tenant: str) -> frozenset[str] | None:
        """Return the nodes of ``tenant`` that are selected; None for all of them.

        Raises:
            UnknownNodeError: a reference or a tag fits no node.
        """
        if not self.has_nodes:
            return None
        sets = [
            {node_id for tag in tags for node_id in names.members(tenant, f"{TAG_SELECTOR}{tag}")}
            for tags in by_key(self.tags)
        ]
        if self.nodes:
            sets.append({names.resolve(tenant, name) for name in self.nodes})
        return frozenset(set.intersection(*sets))


WHOLE_FLEET = Selection()


def has_tags(tags: Collection[str], wanted: Iterable[str]) -> bool:
    """Return whether ``tags`` have one of the values wanted of each key: `site=a`, `site=b` and `gateway`."""
    return all(any(tag in tags for tag in group) for group in by_key(wanted))


def by_key(tags: Iterable[str]) -> list[list[str]]:
    """Return ``tags`` in groups of one key each."""
    groups: defaultdict[str, list[str]] = defaultdict(list)
    for tag in tags:
        groups[tag_key(tag)].append(tag)
    return list(groups.values())


def _is_named(names: NodeNames, tenant: str, reference: str, node_id: str) -> bool:
    try:
        return names.resolve(tenant, reference) == node_id
    except UnknownNodeError:
        return False


FEW_NODES = 1000
"""Up to this many nodes, a list is built from them; of more, at least every tenth tool of 10 000 is shown."""


@define(eq=False, repr=False, slots=False)
class SelectedTools:
    """The tools of one fleet, by selection.

    A list is built from the selected nodes where these are few, and from the index of all tools where they
    are many: either way it reads about as much as a page shows.
    """

    _nodes: NodeIndex
    _names: NodeNames
    _now_ms: Callable[[], int]

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
    """Finds nodes by what they are called, offer and are.

    The order depends on names and ids alone: pages fit together while nodes connect and disconnect.
    """

    def __init__(self, nodes: NodeIndex, names: NodeNames) -> None:
        self._nodes = nodes
        self._names = names
        self._by_name = NameSearch(names)

    def size(self, tenant: str) -> int:
        """Return how many nodes a search in ``tenant`` reads."""
        return len(self._nodes.of_tenant(tenant))

    def found(self, tenant: str, wanted: NodeCriteria) -> list[NodeRecord]:
        """Return the nodes of ``tenant`` that are ``wanted``, best first. Hidden ones are not found.

        Raises:
            UnknownNodeError: the selection names a node or a tag that there is not.
        """
        nodes, hidden = self._nodes.of_tenant(tenant), self._nodes.hidden
        ranked = self._by_name.ranked(tenant, self._nodes.ids_of(tenant), wanted.query)
        found = [nodes[node_id] for node_id in ranked if node_id in nodes and node_id not in hidden]
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
