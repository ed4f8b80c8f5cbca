"""``find_nodes``: the nodes of the caller's tenant that fit a query, ranked, page by page.

Beside each it shows what the node last measured: kept in memory from results of calls and from samples that
others hand in. How nodes are ranked is in ``relay.fleet.selection``. Must not decide who may call, nor show
a node of another tenant, nor read a node.
"""

from collections import OrderedDict
from collections.abc import Callable, Mapping
from math import ceil
from operator import attrgetter
from typing import Any

from attrs import define, field

from relay.auth.permissions import Rights
from relay.calls.relay_tools import RelayTool, RelayToolCall
from relay.fleet.facts import FindNodesEntry, found_node, shows
from relay.fleet.fleet import Fleet
from relay.fleet.node_names import UnknownNodeError
from relay.fleet.node_record import NodeRecord
from relay.fleet.selection import NodeCriteria, Selection
from relay.fleet.tools import Tool, ToolSchemas
from relay.mcp_api.views.node_choice import NODES_LIKE_A_CALL, Charge
from schemas.addresses import View
from schemas.errors import Failure, ToolError
from schemas.kinds import KindRegistry
from schemas.registry import SchemaRegistry
from schemas.times import with_iso

METRICS = "system.metrics"
SAMPLE_REF = f"{METRICS}.sample@1.0.0"
MAX_NODES = 10_000

_KEPT = {
    "cpu": ("usage_pct",),
    "mem": ("total_bytes", "available_bytes"),
    "load": ("one",),
}


@define(eq=False, repr=False)
class Measurements:
    """The last measurement of each node in its tenant, those of at most ``max_nodes``."""

    _tenant_of: Callable[[str], str | None]
    _max_nodes: int = MAX_NODES
    _last: OrderedDict[tuple[str | None, str], Mapping[str, Any]] = field(init=False, factory=OrderedDict)

    def on_result(self, tool: Tool, result: Mapping[str, Any]) -> None:
        if tool.surface.verb.output_ref == SAMPLE_REF:
            self.keep(tool.node_id, result)

    def keep(self, node_id: str, sample: Mapping[str, Any]) -> None:
        """Keep what of ``sample``, which fits its document, is shown. A sample without it changes nothing."""
        brief = {
            part: {name: sample[part][name] for name in names if name in sample[part]}
            for part, names in _KEPT.items()
            if part in sample
        }
        if not brief:
            return
        key = self._tenant_of(node_id), node_id
        self._last[key] = {"ts_ms": sample["ts_ms"], "uptime_s": sample["uptime_s"], **brief}
        self._last.move_to_end(key)
        if len(self._last) > self._max_nodes:
            self._last.popitem(last=False)

    def last(self, node_id: str) -> Mapping[str, Any] | None:
        return self._last.get((self._tenant_of(node_id), node_id))


PAGE_SIZE = 50

FIND_NODES_REFS = "find_nodes.input@1.1.0", "find_nodes.output@1.1.0"
_DESCRIPTION = (
    "Find nodes, the Linux machines that the other tools reach, by words of their label or tags or by the "
    "beginning of their id; without arguments, list all of them. Shows for each its label, tags, whether and "
    "since when it is online, its kinds of capability, and what it last measured and the worst that is wrong "
    "with it if that is known. finding finds nodes with a problem. Use the label or the node_id of a result "
    "wherever a node is asked for."
)

Measured = Callable[[str], Mapping[str, Any] | None]
"""Returns what a node last measured; None if that is not known."""


@define(eq=False, repr=False)
class FindNodes:
    """The tool over one fleet. ``kinds`` are those that there are."""

    _fleet: Fleet
    _kinds: KindRegistry
    _measured: Measured
    _charge: Charge

    def tool(self, registry: SchemaRegistry) -> RelayTool:
        return RelayTool(
            canonical="find_nodes",
            title="Find nodes",
            description=_DESCRIPTION,
            schemas=ToolSchemas.of(registry, *FIND_NODES_REFS),
            schema_ref=FIND_NODES_REFS[0],
            safety_class="read_only",
            idempotent=True,
            visible=attrgetter("may_read"),
            answer=self._answer,
            views=frozenset({View.KINDS}),
        )

    async def _answer(self, call: RelayToolCall) -> Mapping[str, Any]:
        rights = call.caller.principal.rights
        # 1.0 is an integer to JSON Schema, and none to a slice.
        page = int(call.arguments.get("page", 1))
        self._charge(call.caller.principal, self._fleet.search.size(rights.tenant) / NODES_LIKE_A_CALL)
        found = self._found(rights, call.selection, call.arguments)
        shown = found[(page - 1) * PAGE_SIZE : page * PAGE_SIZE]
        return {
            "nodes": [self._entry(node, rights) for node in shown],
            "total": len(found),
            "page": page,
            "pages": ceil(len(found) / PAGE_SIZE),
        }

    def _found(self, rights: Rights, selection: Selection, arguments: Mapping[str, Any]) -> list[NodeRecord]:
        wanted = NodeCriteria(
            query=arguments.get("query", ""),
            kinds=self._wanted_kinds(selection, arguments.get("kind")),
            tags=arguments.get("tags", ()),
            online=arguments.get("online"),
            finding=arguments.get("finding"),
            selection=selection,
        )
        try:
            return self._fleet.search.found(rights, wanted)
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

    def _entry(self, node: NodeRecord, rights: Rights) -> FindNodesEntry:
        entry = found_node(node, self._fleet.names, rights)
        measured = self._measured(node.node_id) if shows(node, rights, METRICS) else None
        if measured is not None:
            entry["measured"] = with_iso(measured, {"ts_ms": "ts"})
        return entry
