"""``find_nodes``: which nodes the caller's tenant has, page by page.

Must not decide who may call, nor show a node of another tenant.
"""

from collections.abc import Mapping
from math import ceil
from typing import Any

from relay.auth.permissions import Rights
from relay.calls.relay_tools import RelayTool, RelayToolCall
from relay.config import View
from relay.fleet.fleet import Fleet
from relay.fleet.node_record import NodeRecord
from relay.fleet.tool_schemas import ToolSchemas
from schemas.registry import SchemaRegistry

PAGE_SIZE = 50

_INPUT = "find_nodes.input@1.0.0"
_DESCRIPTION = (
    "Find nodes, the Linux machines that the other tools can reach, and see which are online and what "
    "each offers. Without arguments it lists all of them. Use a `node_id` of the result to name a node."
)


class FindNodes:
    """The tool over one fleet."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    def tool(self, registry: SchemaRegistry) -> RelayTool:
        """Return the tool, to be registered."""
        return RelayTool(
            canonical="find_nodes",
            title="Find nodes",
            description=_DESCRIPTION,
            schemas=ToolSchemas.of(registry, _INPUT, "find_nodes.output@1.0.0"),
            schema_ref=_INPUT,
            safety_class="read_only",
            idempotent=True,
            visible=_may_read,
            answer=self._answer,
            views=frozenset({View.KINDS}),
        )

    async def _answer(self, call: RelayToolCall) -> Mapping[str, Any]:
        page: int = call.arguments.get("page", 1)
        found = [
            node
            for node in self._fleet.nodes_of(call.caller.principal.tenant)
            if _matches(node, call.arguments)
        ]
        shown = found[(page - 1) * PAGE_SIZE : page * PAGE_SIZE]
        return {
            "nodes": [_entry(node) for node in shown],
            "total": len(found),
            "page": page,
            "pages": ceil(len(found) / PAGE_SIZE),
        }


def _may_read(rights: Rights) -> bool:
    return rights.may_read


def _matches(node: NodeRecord, arguments: Mapping[str, Any]) -> bool:
    return (
        node.node_id.startswith(arguments.get("query", "").lower())
        and arguments.get("online", node.connected) == node.connected
        and ("kind" not in arguments or arguments["kind"] in _kinds_of(node))
    )


def _entry(node: NodeRecord) -> dict[str, Any]:
    return {"node_id": node.node_id, "online": node.connected, "kinds": sorted(_kinds_of(node))}


def _kinds_of(node: NodeRecord) -> set[str]:
    return {tool.surface.kind.name for tool in node.tools.values()}
