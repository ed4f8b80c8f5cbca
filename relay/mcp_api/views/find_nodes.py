"""``find_nodes``: the nodes of the caller's tenant that fit a query, ranked, page by page.

How they are ranked is in ``relay.fleet.selection``. Must not decide who may call, nor show a node of
another tenant.
"""

from collections.abc import Callable, Mapping
from math import ceil
from typing import Any

from relay.auth.permissions import Rights
from relay.calls.relay_tools import RelayTool, RelayToolCall
from relay.fleet.facts import FindNodesEntry, found_node
from relay.fleet.fleet import Fleet
from relay.fleet.node_names import UnknownNodeError
from relay.fleet.node_record import NodeRecord
from relay.fleet.selection import NodeCriteria, Selection
from relay.fleet.tools import ToolSchemas
from relay.mcp_api.views.node_choice import NODES_LIKE_A_CALL, Charge
from relay.settings.config import View
from schemas.errors import Failure, ToolError
from schemas.kinds import KindRegistry
from schemas.registry import SchemaRegistry
from schemas.times import with_iso

PAGE_SIZE = 50

_INPUT = "find_nodes.input@1.0.0"
_DESCRIPTION = (
    "Find nodes, the Linux machines that the other tools reach, by words of their label or tags or by the "
    "beginning of their id; without arguments, list all of them. Shows for each its label, tags, whether and "
    "since when it is online, its kinds of capability, and what it last measured if that is known. Use the "
    "label or the node_id of a result wherever a node is asked for."
)

Measured = Callable[[str], Mapping[str, Any] | None]
"""Returns what a node last measured; None if that is not known."""


class FindNodes:
    """The tool over one fleet. ``kinds`` are those that there are."""

    def __init__(self, fleet: Fleet, kinds: KindRegistry, measured: Measured, charge: Charge) -> None:
        self._fleet = fleet
        self._charge = charge
        self._kinds = kinds
        self._measured = measured

    def tool(self, registry: SchemaRegistry) -> RelayTool:
        """Return the tool, to be registered."""
        return RelayTool(
            canonical="find_nodes",
            title="Find nodes",
            description=_DESCRIPTION,
            schemas=ToolSchemas.of(registry, _INPUT, "find_nodes.output@1.1.0"),
            schema_ref=_INPUT,
            safety_class="read_only",
            idempotent=True,
            visible=_may_read,
            answer=self._answer,
            views=frozenset({View.KINDS}),
        )

    async def _answer(self, call: RelayToolCall) -> Mapping[str, Any]:
        tenant = call.caller.principal.tenant
        # 1.0 is an integer to JSON Schema, and none to a slice.
        page = int(call.arguments.get("page", 1))
        self._charge(call.caller.principal, self._fleet.search.size(tenant) / NODES_LIKE_A_CALL)
        found = self._found(tenant, call.selection, call.arguments)
        shown = found[(page - 1) * PAGE_SIZE : page * PAGE_SIZE]
        return {
            "nodes": [self._entry(node) for node in shown],
            "total": len(found),
            "page": page,
            "pages": ceil(len(found) / PAGE_SIZE),
        }

    def _found(self, tenant: str, selection: Selection, arguments: Mapping[str, Any]) -> list[NodeRecord]:
        """Return the nodes that fit ``arguments``, in order.

        Raises:
            ToolError: there is no such kind, or the selection names a node that there is not.
        """
        wanted = NodeCriteria(
            query=arguments.get("query", ""),
            kinds=self._wanted_kinds(selection, arguments.get("kind")),
            tags=arguments.get("tags", ()),
            online=arguments.get("online"),
            selection=selection,
        )
        try:
            return self._fleet.search.found(tenant, wanted)
        except UnknownNodeError as error:
            text = "The URL of this server selects a node or a tag that there is not."
            raise ToolError(Failure.SAFETY_DENIED, text, fix=f"{error}.") from None

    def _wanted_kinds(self, selection: Selection, name: str | None) -> frozenset[str]:
        """Return the kinds of which a node must have one; none: it need not have any."""
        if name is None:
            return frozenset(kind.name for kind in self._kinds if kind.short in selection.kinds)
        kind = self._kinds.get(name) or self._kinds.by_short(name)
        if kind is None or not selection.admits_kind(kind.short):
            known = sorted(kind.name for kind in self._kinds if selection.admits_kind(kind.short))
            fix = f"Send one of: {', '.join(known)}."
            raise ToolError(Failure.ARGUMENTS_INVALID, "kind: there is no such kind.", fix=fix)
        return frozenset({kind.name})

    def _entry(self, node: NodeRecord) -> FindNodesEntry:
        entry = found_node(node, self._fleet.names)
        if (measured := self._measured(node.node_id)) is not None:
            entry["measured"] = with_iso(measured, {"ts_ms": "ts"})
        return entry


def _may_read(rights: Rights) -> bool:
    return rights.may_read
