"""What ``tools/list`` lists to one caller: the nodes' tools, and those that the relay answers itself.

Must not decide which nodes' tools a caller reaches: the fleet does.
"""

from collections.abc import Sequence
from heapq import merge

from relay.auth.permissions import Rights
from relay.calls.relay_tools import RelayTools
from relay.fleet.fleet import Fleet
from relay.fleet.selection import Selection
from relay.fleet.tools import Position
from relay.mcp_api.paging import ToolEntry
from relay.mcp_api.relay_tools import RelayToolEntries
from relay.mcp_api.url_options import UrlOptionReader
from relay.settings.config import View


class ToolList:
    """The lists of one relay, all sorted by place. ``options`` reads what a URL selects of them."""

    def __init__(self, fleet: Fleet, relay_tools: RelayTools, options: UrlOptionReader) -> None:
        self.options = options
        self._fleet = fleet
        self._of_relay = RelayToolEntries(relay_tools)

    def listed(
        self, rights: Rights, selection: Selection, after: Position, limit: int
    ) -> Sequence[ToolEntry]:
        """Return what ``rights`` reach of ``selection``: at most ``limit`` of those behind ``after``.

        Raises:
            UnknownNodeError: the selection names a node or a tag that there is not.
        """
        tools: Sequence[ToolEntry] = []
        if selection.view is View.TOOLS:
            tools = self._fleet.selected.listed(rights, selection, after, limit)
        offered = self._fleet.selected.offered(rights, selection) if selection.view is View.KINDS else {}
        of_relay: Sequence[ToolEntry] = self._of_relay.listed(rights, selection.view, offered, after)
        if not of_relay:
            return tools
        return list(merge(of_relay, tools, key=_place_of))[:limit]


def _place_of(tool: ToolEntry) -> Position:
    return tool.place
