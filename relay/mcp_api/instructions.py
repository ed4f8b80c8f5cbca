"""What agents read of this server when they connect: a static text, and how the nodes are called.

Clients that defer tools search names, titles and these instructions. The labels are the operator's, and each
tenant reads its own alone. Must not contain anything that a node sent.
"""

from collections.abc import Iterable, Iterator

from relay.auth.permissions import Rights
from relay.fleet.fleet import Fleet

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
_MORE = ", and more, which fleet://nodes lists"


class Instructions:
    """The instructions of one relay."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    def text(self, rights: Rights) -> str:
        """Return the instructions for callers with ``rights``: at most ``MAX_BYTES``."""
        labels = self._fleet.labels(rights.tenant) if rights.may_read else ()
        return _STATIC + _named(labels, MAX_BYTES - len(_STATIC))


def _named(labels: Iterable[str], limit: int) -> str:
    """Return the sentence with ``labels``, as many as fit into ``limit``; empty if there are none."""
    # No label contains a quotation mark.
    quoted: Iterator[str] = (f'"{label}"' for label in labels)
    text = _BEFORE + next(quoted, "")
    if text == _BEFORE:
        return ""
    for label in quoted:
        if len(f"{text}, {label}{_MORE}.".encode()) > limit:
            return f"{text}{_MORE}."
        text += f", {label}"
    return f"{text}."
