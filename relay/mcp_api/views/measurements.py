"""What each node last measured, briefly: what ``find_nodes`` shows beside it.

Kept in memory from the results of calls and from samples that others hand in, of the nodes that were measured
last. Must not read a node by itself.
"""

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from relay.fleet.tools import Tool

SAMPLE_REF = "system.metrics.sample@1.0.0"
MAX_NODES = 10_000

_KEPT = {
    "cpu": ("usage_pct",),
    "mem": ("total_bytes", "available_bytes"),
    "load": ("one",),
}


class Measurements:
    """The last measurement of each node, those of at most ``max_nodes``."""

    def __init__(self, max_nodes: int = MAX_NODES) -> None:
        self._max_nodes = max_nodes
        self._last: OrderedDict[str, Mapping[str, Any]] = OrderedDict()

    def on_result(self, tool: Tool, result: Mapping[str, Any]) -> None:
        """Keep the result of a call if it is a measurement."""
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
        self._last[node_id] = {"ts_ms": sample["ts_ms"], "uptime_s": sample["uptime_s"], **brief}
        self._last.move_to_end(node_id)
        if len(self._last) > self._max_nodes:
            self._last.popitem(last=False)

    def last(self, node_id: str) -> Mapping[str, Any] | None:
        """Return what ``node_id`` last measured; None if that is not known."""
        return self._last.get(node_id)
