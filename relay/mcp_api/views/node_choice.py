"""Chooses the nodes, and the tool of each, that the arguments of a call in the kinds view name.

All look-ups are within the caller's tenant and what its URL selects: what is outside does not exist. Must not
call a node.
"""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

from attrs import define

from relay.auth.agent_tokens import Principal
from relay.auth.permissions import SCOPE_OF_SAFETY_CLASS, Rights
from relay.fleet.fleet import Fleet
from relay.fleet.node_names import ALL, UnknownNodeError
from relay.fleet.node_record import NodeRecord
from relay.fleet.selection import TAG_SELECTOR, Selection
from relay.fleet.tools import Offer, Tool
from relay.mcp_api.views.answer_query import AnswerQuery
from schemas.errors import Failure, ToolError

Charge = Callable[[Principal, float], None]
"""Charges some calls to an agent's limit; raises ToolError if that is exceeded."""

NODES_LIKE_A_CALL = 1000
"""Going through the names and tools of this many nodes is charged as one call."""

_FIND = "find_nodes finds nodes."


@dataclass(frozen=True, slots=True)
class Member:
    """One node to ask: what its entry has, whatever it answers.

    Attributes:
        manifest_etag: of the manifest that was valid when it was chosen; None if there was none.
    """

    node_id: str
    label: str
    manifest_etag: str | None


@dataclass(frozen=True, slots=True)
class Members:
    """The nodes that are asked.

    Attributes:
        more: whether others that were selected are not.
        by_id: whether they are in the order of their ids, so that the last one shows where to go on.
    """

    nodes: Sequence[Member]
    more: bool
    by_id: bool


@define(eq=False, repr=False)
class NodeChoice:
    """The nodes of one fleet. ``charge`` is called for what takes longer than a call."""

    _fleet: Fleet
    _now_ms: Callable[[], int]
    _charge: Charge

    def node(self, rights: Rights, selection: Selection, reference: str, member: str = "node") -> str:
        """Return the node that ``reference`` names: its id, its label or the beginning of its id.

        Raises:
            ToolError: none that the caller reaches; it names ``member``, which holds the reference.
        """
        try:
            node_id = self._fleet.names.resolve(rights.tenant, reference)
        except UnknownNodeError as error:
            raise _unknown(member, error) from None
        if not selection.admits_node(self._fleet.names, rights.tenant, node_id):
            raise _unknown(member, UnknownNodeError(reference))
        return node_id

    def tool(self, rights: Rights, node_id: str, offer: Offer, capability: str | None) -> Tool:
        """Return the node's tool of that kind and verb.

        Raises:
            ToolError: there is none that the caller reaches, or there are several and no ``capability``.
        """
        node = self._fleet.node_of(rights.tenant, node_id)
        tools = [tool for tool in node.tools.values() if tool.offer == offer] if node is not None else []
        if node is None or not tools:
            absent = self._fleet.absences.error(node_id, node, rights.tenant, kind_known=True)
            if absent.failure is Failure.NAME_UNKNOWN:
                raise ToolError(Failure.NAME_UNKNOWN, "The node has no capability of this kind.", fix=_FIND)
            raise absent
        reached = [tool for tool in tools if rights.allow(rights.tenant, tool.safety_class)]
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
        offer: Offer,
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
        rights = _reading(principal.rights)
        broad = len(set(filter(_is_broad, selectors)))
        self._charge(principal, broad * self._fleet.search.size(rights.tenant) / NODES_LIKE_A_CALL)
        is_meant = cache(self._is_meant(rights, selection, offer))  # selectors may mean the same nodes
        meant = [
            self._meant(rights, selection, is_meant, selector, query) for selector in dict.fromkeys(selectors)
        ]
        found = list(dict.fromkeys(node_id for node_ids in meant for node_id in node_ids))
        if broad or query.after is not None:
            found = sorted(node_id for node_id in found if node_id > (query.after or ""))
        nodes = [self._member(rights.tenant, node_id) for node_id in found[: query.most_asked]]
        return Members(nodes, len(found) > len(nodes), by_id=broad > 0 or query.after is not None)

    def _member(self, tenant: str, node_id: str) -> Member:
        node = self._fleet.node_of(tenant, node_id)
        manifest = node.manifest if node is not None and self._is_valid(node) else None
        return Member(
            node_id, self._fleet.names.label_of(node_id), manifest.etag if manifest is not None else None
        )

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
            selected = self._fleet.names.members(rights.tenant, selector)
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

    def _is_meant(self, rights: Rights, selection: Selection, offer: Offer) -> Callable[[str], bool]:
        """Return whether a node is selected, and offers the kind and verb now."""
        try:
            selected = selection.node_ids(self._fleet.names, rights.tenant)
        except UnknownNodeError:
            selected = frozenset()

        def is_meant(node_id: str) -> bool:
            node = self._fleet.node_of(rights.tenant, node_id)
            return (
                node is not None
                and (selected is None or node_id in selected)
                and self._is_valid(node)
                and any(_is_reached(tool, rights, offer) for tool in node.tools.values())
            )

        return is_meant

    def _is_valid(self, node: NodeRecord) -> bool:
        return node.manifest is not None and node.manifest.good_until_ms > self._now_ms()


def _is_broad(selector: str) -> bool:
    return selector == ALL or "=" in selector or selector.startswith(TAG_SELECTOR)


def _reading(rights: Rights) -> Rights:
    return Rights.of(rights.tenant, [SCOPE_OF_SAFETY_CLASS["read_only"]] if rights.may_read else [])


def _is_reached(tool: Tool, rights: Rights, offer: Offer) -> bool:
    return tool.offer == offer and rights.allow(rights.tenant, tool.safety_class)


def _unknown(member: str, error: UnknownNodeError) -> ToolError:
    # The detail is logged, and no text of a caller is.
    text = f"{member}: there is no such node."
    return ToolError(Failure.SAFETY_DENIED, text, told=error.headline, fix=f"{error}. {_FIND}")
