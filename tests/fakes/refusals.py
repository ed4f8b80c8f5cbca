"""What the audit says of refusals, and what a relay shows of its nodes, as attacks check them."""

from typing import Any

from schemas.projection import ToolName
from tests.fakes.hub import Hub
from tests.fakes.signer import SimulatedNode

_IN_EVERY_LINE = {"ts_ms", "prev"}


def audited_refusals(hub: Hub) -> list[dict[str, Any]]:
    """Let the second be over and return the counted lines of the audit, less what every line has."""
    hub.refusals.write()
    return [
        {name: value for name, value in line.items() if name not in _IN_EVERY_LINE}
        for line in hub.audited()
        if "event" in line and "count" in line
    ]


def refusal(event: str, source: str, reason: str, count: int = 1) -> dict[str, Any]:
    """Return the line that says so, as ``audited_refusals`` returns it."""
    return {"event": event, "source": source, "reason": reason, "count": count}


def manifest_in_force(hub: Hub, node: SimulatedNode) -> bytes | None:
    """Return the wire bytes of the manifest that the relay goes by, or None."""
    for known in hub.nodes_of(node.tenant):
        if known.node_id == node.node_id:
            return known.manifest.wire if known.manifest else None
    return None


def echo_of(node: SimulatedNode) -> str:
    """Return the name of the node's ``system.echo``."""
    return ToolName("sysecho", node.node_id, "echo", "invoke").canonical


def metrics_of(node: SimulatedNode) -> str:
    """Return the name of the node's ``system.metrics``."""
    return ToolName("sys", node.node_id, "sysmetrics", "snapshot").canonical
