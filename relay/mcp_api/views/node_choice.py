"""Chooses the nodes, and the tool of each, that the arguments of a call in the kinds view name.

All look-ups are within what the caller reaches and its URL selects: what is outside does not exist. Must not
call a node.
"""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from functools import cache

from attrs import define

from relay.auth.agent_tokens import Principal
from relay.auth.permissions import SCOPE_OF_SAFETY_CLASS, Rights
from relay.fleet.fleet import Fleet
from relay.fleet.node_names import ALL, UnknownNodeError, is_tag_selector
from relay.fleet.selection import Selection
from relay.fleet.tools import KindVerb, Tool
from relay.mcp_api.views.many_nodes import AnswerQuery, Member, Members
from schemas.errors import Failure, ToolError
from schemas.times import ValidityClock

Charge = Callable[[Principal, float], None]
"""Charges some calls to an agent's limit; raises ToolError if that is exceeded."""

NODES_LIKE_A_CALL = 1000
"""Going through the names and tools of this many nodes is charged as one call."""

_FIND = "find_nodes finds nodes."


@define(eq=False, repr=False)
class NodeChoice:
    """The nodes of one fleet. ``charge`` is called for what takes longer than a call."""

    _fleet: Fleet
    _now_ms: ValidityClock
    _charge: Charge

    def node(self, rights: Rights, selection: Selection, reference: str, member: str = "node") -> str:
        """Return the node that ``reference`` names: its id, its label or the beginning of its id.

        Raises:
            ToolError: none that the caller reaches; it names ``member``, which holds the reference.
        """
        try:
            node_id = self._fleet.reach.resolve(rights, reference)
        except UnknownNodeError as error:
            raise _unknown(member, error) from None
        if not selection.admits_node(self._fleet.reach, rights, node_id):
            raise _unknown(member, UnknownNodeError(reference))
        return node_id

    def tool(self, rights: Rights, node_id: str, kind_verb: KindVerb, capability: str | None) -> Tool:
        """Return the node's tool of that kind and verb.

        Raises:
            ToolError: there is none that the caller reaches, or there are several and no ``capability``.
        """
        node = self._fleet.reach.node(rights, node_id)
        tools = (
            [tool for tool in node.tools.values() if tool.kind_verb == kind_verb] if node is not None else []
        )
        if node is None or not tools:
            absent = self._fleet.absence(node_id, rights)
            if absent.failure is Failure.NAME_UNKNOWN:
                raise ToolError(Failure.NAME_UNKNOWN, "The node has no capability of this kind.", fix=_FIND)
            raise absent
        reached = [
            tool for tool in tools if rights.allow(rights.tenant, tool.safety_class, tool.surface.kind)
        ]
        if not reached:
            raise ToolError(Failure.SAFETY_DENIED)
        fitting = [tool for tool in reached if capability in {None, tool.cap_id}]
        if len(fitting) == 1:
            return fitting[0]
        fix = f"Send as capability one of: {', '.join(sorted(tool.cap_id for tool in reached))}."
        if not fitting:
            text = "capability: the node has no such capability of this kind."
            raise ToolError(Failure.NAME_UNKNOWN, text, fix=fix)
        text = "capability: the node has several capabilities of this kind, and none is named."
        raise ToolError(Failure.ARGUMENTS_INVALID, text, fix=fix)

    def members(
        self,
        principal: Principal,
        selection: Selection,
        kind_verb: KindVerb,
        selectors: Sequence[str],
        query: AnswerQuery,
    ) -> Members:
        """Return the nodes that ``selectors`` mean to read and ``query`` asks, each once.

        A tag and ``*`` mean those that offer the kind and verb now, by a valid manifest; then all are in the
        order of their ids. A node that is named is one in any case: its caller must learn that it cannot be
        asked.

        Raises:
            ToolError: a selector means no node, or the agent's limit is exceeded.
        """
        reading = [SCOPE_OF_SAFETY_CLASS["read_only"]] if principal.rights.may_read else []
        own = principal.rights
        rights = Rights.of(own.tenant, reading, own.kinds, own.nodes)
        broad = len(set(filter(_is_broad, selectors)))
        self._charge(principal, broad * self._fleet.search.size(rights.tenant) / NODES_LIKE_A_CALL)
        is_meant = cache(self._is_meant(rights, selection, kind_verb))  # selectors may mean the same nodes
        meant = [
            self._meant(rights, selection, is_meant, selector, query) for selector in dict.fromkeys(selectors)
        ]
        found = list(dict.fromkeys(node_id for node_ids in meant for node_id in node_ids))
        if broad or query.after is not None:
            found = sorted(node_id for node_id in found if node_id > (query.after or ""))
        nodes = [self._member(rights, node_id) for node_id in found[: query.most_asked]]
        return Members(nodes, len(found) > len(nodes), by_id=broad > 0 or query.after is not None)

    def _member(self, rights: Rights, node_id: str) -> Member:
        node = self._fleet.reach.node(rights, node_id)
        manifest = node.manifest if node is not None else None
        is_valid = manifest is not None and manifest.good_until_ms > self._now_ms()
        etag = manifest.etag if manifest is not None and is_valid else None
        return Member(node_id, self._fleet.names.label_of(node_id), etag)

    def _meant(
        self,
        rights: Rights,
        selection: Selection,
        is_meant: Callable[[str], bool],
        selector: str,
        query: AnswerQuery,
    ) -> list[str]:
        if not _is_broad(selector):
            return [self.node(rights, selection, selector, "nodes")]
        try:
            selected = self._fleet.reach.members(rights, selector)
        except UnknownNodeError as error:
            raise _unknown("nodes", error) from None
        meant: list[str] = []
        for node_id in selected[bisect_right(selected, query.after or "") :]:
            if is_meant(node_id):
                meant.append(node_id)
                if len(meant) > query.most_asked:
                    break  # as many as decide that there are more
        if not meant and query.after is None:
            raise ToolError(
                Failure.MANIFEST_NOT_FOUND, "nodes: none of the nodes selected offers this now.", fix=_FIND
            )
        return meant

    def _is_meant(self, rights: Rights, selection: Selection, kind_verb: KindVerb) -> Callable[[str], bool]:
        """Return whether a node is selected, and offers the kind and verb now."""
        try:
            selected = selection.node_ids(self._fleet.reach, rights)
        except UnknownNodeError:
            selected = frozenset()

        def is_meant(node_id: str) -> bool:
            node = self._fleet.reach.node(rights, node_id)
            return (
                node is not None
                and (selected is None or node_id in selected)
                and any(
                    tool.kind_verb == kind_verb and self._fleet.is_usable(tool, rights)
                    for tool in node.tools.values()
                )
            )

        return is_meant


def _is_broad(selector: str) -> bool:
    return selector == ALL or is_tag_selector(selector)


def _unknown(member: str, error: UnknownNodeError) -> ToolError:
    # The detail is logged, and no text of a caller is.
    text = f"{member}: there is no such node."
    return ToolError(Failure.SAFETY_DENIED, text, told=error.headline, fix=f"{error}. {_FIND}")
