"""What a client's URL selects of the fleet: a view, and some of the nodes, kinds and tags.

It narrows what is listed, what can be called by that URL, and what a search finds. It is no permission: the
same token is good for any URL. Must not read a URL, nor decide what a caller may use.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from attrs import Factory, define, field

from relay.auth.permissions import TAG, Rights
from relay.fleet.facts import HEALTH, SEVERITIES, severity_rank, shows
from relay.fleet.node_index import NodeIndex
from relay.fleet.node_names import NameSearch, UnknownNodeError
from relay.fleet.node_record import NodeRecord
from relay.fleet.reach import Reach
from relay.fleet.tool_index import SEVERITY, Only, ToolIndex, Version
from relay.fleet.tools import BEFORE_ALL, KindVerb, Position, Tool
from schemas.addresses import View
from schemas.errors import Failure, ToolError
from schemas.labels import tag_key
from schemas.projection import ToolName
from schemas.times import ValidityClock


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

    def admits_node(self, reach: Reach, rights: Rights, node_id: str) -> bool:
        """Return whether a node that ``rights`` reach is selected. What fits no node selects none."""
        if self.tags and not has_tags(reach.names.tags_of(node_id), self.tags):
            return False
        return not self.nodes or any(_is_named(reach, rights, name, node_id) for name in self.nodes)

    def node_ids(self, reach: Reach, rights: Rights) -> frozenset[str] | None:
        """Return the nodes that are selected of those that ``rights`` reach; None for all of the tenant.

        Raises:
            UnknownNodeError: a reference or a tag fits no node.
        """
        if not self.has_nodes:
            return reach.ids(rights)
        sets = [
            {node_id for tag in tags for node_id in reach.members(rights, f"{TAG}{tag}")}
            for tags in by_key(self.tags)
        ]
        if self.nodes:
            sets.append({reach.resolve(rights, name) for name in self.nodes})
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


def _is_named(reach: Reach, rights: Rights, reference: str, node_id: str) -> bool:
    try:
        return reach.resolve(rights, reference) == node_id
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
    _reach: Reach
    _now_ms: ValidityClock

    def check(self, selection: Selection, name: ToolName | None, rights: Rights) -> None:
        """Return if ``selection`` leaves the tool ``name`` in; a malformed name is left in.

        Raises:
            ToolError: it does not: as if the node did not exist, or as if it had no such tool.
        """
        if name is None or not selection.is_narrowed:
            return
        if not selection.admits_node(self._reach, rights, name.node_id):
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
        tools = self._settled()
        if not selection.is_narrowed and rights.nodes is None:
            return tools.listed(rights, after, limit)
        node_ids = selection.node_ids(self._reach, rights)
        if node_ids is not None and len(node_ids) <= FEW_NODES:
            behind = [tool for tool in self._of_nodes(rights, selection, node_ids) if tool.place > after]
            return sorted(behind, key=lambda tool: tool.place)[:limit]
        return tools.narrowed(rights, Only(selection.kinds, node_ids), after, limit)

    def offered(self, rights: Rights, selection: Selection = WHOLE_FLEET) -> Mapping[KindVerb, str]:
        """Return the kinds and verbs of the selected tools that ``rights`` reach, with the severest class.

        Raises:
            UnknownNodeError: as ``listed``.
        """
        every = {
            kind_verb: safety_class
            for kind_verb, safety_class in self._settled().offered(rights).items()
            if selection.admits_kind(kind_verb[0])
        }
        node_ids = selection.node_ids(self._reach, rights)
        if node_ids is None:
            return every
        offered: dict[KindVerb, str] = {}
        for tool in self._of_nodes(rights, selection, node_ids):
            known = offered.get(tool.kind_verb)
            if known is None or SEVERITY[known] < SEVERITY[tool.safety_class]:
                offered[tool.kind_verb] = tool.safety_class
                if offered == every:
                    break
        return offered

    def version(self, rights: Rights, selection: Selection = WHOLE_FLEET) -> Version:
        """Return a version that differs whenever the selected list does: names, titles, schemas, classes.

        It may differ more often where nodes are selected: then it is that of all nodes and of their names.
        """
        if selection.view is View.KINDS:
            try:
                offered = self.offered(rights, selection)
            except UnknownNodeError:
                offered = {}
            return frozenset((f"{kind}.{verb}", SEVERITY[worst]) for (kind, verb), worst in offered.items())
        version = self._settled().version(rights)
        if not selection.has_nodes and rights.nodes is None:
            return version
        return version | {("names", self._reach.names.revision(rights.tenant))}

    def _settled(self) -> ToolIndex:
        """Return the tools that are listed now."""
        self._nodes.settle(self._now_ms())
        return self._nodes.tools

    def _of_nodes(self, rights: Rights, selection: Selection, node_ids: Iterable[str]) -> Iterable[Tool]:
        nodes = self._nodes.of_tenant(rights.tenant)
        return (
            tool
            for node_id in node_ids
            if node_id in nodes
            for tool in nodes[node_id].indexed_tools.values()
            if rights.allow(rights.tenant, tool.safety_class, tool.surface.kind)
            and selection.admits_kind(tool.surface.kind.short)
        )


def _has(node: NodeRecord, finding: str) -> bool:
    """Return whether something is wrong with ``node``: anything, something that severe, or of that code."""
    if finding == "any" or not node.findings:
        return bool(node.findings)
    if finding in SEVERITIES:
        return severity_rank(node.findings[0]) <= SEVERITIES.index(finding)
    return any(each["code"] == finding for each in node.findings)


@dataclass(frozen=True, slots=True)
class NodeCriteria:
    """What a node must fit.

    Attributes:
        query: words of its label or its tags, or the beginning of its id; no words mean any.
        kinds: the names of kinds of which it must announce one; empty: it need not.
        tags: those that it must have; of several values of one key, one.
        online: whether it must be connected, or must not; None: either.
        finding: what must be wrong with it: ``any``, a severity that is reached, or a code; None: nothing.
        selection: what the caller's URL narrows the fleet to.
    """

    query: str = ""
    kinds: frozenset[str] = frozenset()
    tags: Collection[str] = ()
    online: bool | None = None
    finding: str | None = None
    selection: Selection = WHOLE_FLEET


@define(eq=False, repr=False)
class NodeSearch:
    """Finds nodes by what they are called, offer and are.

    The order depends on names and ids alone: pages fit together while nodes connect and disconnect.
    """

    _nodes: NodeIndex
    _reach: Reach
    _by_name: NameSearch = field(
        init=False, default=Factory(lambda self: NameSearch(self._reach.names), takes_self=True)
    )

    def size(self, tenant: str) -> int:
        """Return how many nodes a search in ``tenant`` reads."""
        return len(self._nodes.of_tenant(tenant))

    def found(self, rights: Rights, wanted: NodeCriteria) -> list[NodeRecord]:
        """Return the nodes that ``rights`` reach and that are ``wanted``, best first, without hidden ones.

        Raises:
            UnknownNodeError: the selection names a node or a tag that there is not.
        """
        tenant = rights.tenant
        nodes, hidden = self._nodes.of_tenant(tenant), self._nodes.hidden
        ranked = self._by_name.ranked(tenant, self._nodes.ids_of(tenant), wanted.query)
        found = [nodes[node_id] for node_id in ranked if node_id in nodes and node_id not in hidden]
        selected = wanted.selection.node_ids(self._reach, rights)
        if selected is not None:
            found = [node for node in found if node.node_id in selected]
        if wanted.kinds:
            found = [node for node in found if not wanted.kinds.isdisjoint(node.kinds)]
        for tags in by_key(wanted.tags):
            tagged = set[str]().union(*(self._reach.names.tagged(tenant, tag) for tag in tags))
            found = [node for node in found if node.node_id in tagged]
        if wanted.online is not None:
            found = [node for node in found if node.connected is wanted.online]
        if (finding := wanted.finding) is not None:
            found = [node for node in found if _has(node, finding) and shows(node, rights, HEALTH)]
        return found
