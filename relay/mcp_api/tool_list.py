"""What ``tools/list`` lists to one caller: the nodes' tools, and those that the relay answers itself.

Must not decide which nodes' tools a caller reaches: the fleet does.
"""

from collections.abc import Sequence
from heapq import merge

from relay.auth.permissions import Rights
from relay.calls.relay_tools import RelayTools
from relay.config import View
from relay.fleet.fleet import Fleet
from relay.fleet.tools import Place
from relay.mcp_api.paging import ToolEntry
from relay.mcp_api.relay_tools import RelayToolEntries


class ToolList:
    """The lists of one relay, all sorted by place."""

    def __init__(self, fleet: Fleet, relay_tools: RelayTools) -> None:
        self._fleet = fleet
        self._of_relay = RelayToolEntries(relay_tools)

    def listed(self, rights: Rights, view: View, after: Place, limit: int) -> Sequence[ToolEntry]:
        """Return what ``rights`` reach in ``view``: at most ``limit`` of those behind ``after``."""
        tools: Sequence[ToolEntry] = self._fleet.listed(rights, after, limit) if view is View.TOOLS else []
        of_relay: Sequence[ToolEntry] = self._of_relay.listed(rights, view, after)
        if not of_relay:
            return tools
        return list(merge(of_relay, tools, key=_place_of))[:limit]


def _place_of(tool: ToolEntry) -> Place:
    return tool.place
