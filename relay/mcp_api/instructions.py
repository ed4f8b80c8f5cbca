"""What agents read of this server when they connect: a static text, and how the nodes are called.

Clients that defer tools search names, titles and these instructions. The labels are the operator's, and each
tenant reads its own alone. Must not contain anything that a node sent.
"""

from collections.abc import Iterator

from relay.auth.permissions import Rights
from relay.fleet.fleet import Fleet
from relay.settings.config import View

MAX_BYTES = 1500
"""Clients cut instructions at two kilobytes."""

_STATIC = (
    "Each tool is one capability of one Linux node, named kind.node.capability.verb; or, named kind.verb, "
    "it is for the node that its argument node names by label or id, and find_nodes finds nodes. "
    "subscribe starts sampling; it stops when the call with a progress token is cancelled, or when "
    "node://{node_id}/telemetry was not read or followed for three intervals, at least 30 seconds. "
    "Errors are JSON with code, message and suggested_fix; do what suggested_fix says."
)
_BEFORE = " The operator calls the nodes: "
_BEFORE_WITH_IDS = " The operator calls the nodes, whose ids in names of tools begin as said: "
_MORE = ", and more, which fleet://nodes lists"


class Instructions:
    """The instructions of one relay."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    def text(self, rights: Rights, view: View) -> str:
        """Return the instructions for callers with ``rights``: at most ``MAX_BYTES`` in UTF-8.

        A tool of ``View.TOOLS`` has its node's id in its name and not the label: there both are named.
        """
        if not rights.may_read:
            return _STATIC
        with_ids = view is View.TOOLS
        # No label contains a quotation mark.
        nodes = (
            f'"{label}" ({self._fleet.names.beginning_of(rights.tenant, node_id)})'
            if with_ids
            else f'"{label}"'
            for label, node_id in self._fleet.labels(rights.tenant)
        )
        return _STATIC + _sentence(_BEFORE_WITH_IDS if with_ids else _BEFORE, nodes, MAX_BYTES - len(_STATIC))


def _sentence(before: str, nodes: Iterator[str], limit: int) -> str:
    """Return the sentence with as many of ``nodes`` as fit into ``limit``; empty if there are none."""
    first = next(nodes, None)
    if first is None:
        return ""
    text = before + first
    for node in nodes:
        if len(f"{text}, {node}{_MORE}.".encode()) > limit:
            return f"{text}{_MORE}."
        text += f", {node}"
    return f"{text}."
