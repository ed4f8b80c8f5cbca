"""Logs that nodes connect and disconnect, for the operator. Must not decide anything by it."""

from structlog.typing import FilteringBoundLogger

from relay.routing.port import ConnectionHandler, NodeRef


def connection_log(log: FilteringBoundLogger) -> ConnectionHandler:
    """Return what writes one line for each session of a node that begins or ends."""

    def written(node: NodeRef, connected: bool) -> None:  # noqa: FBT001 - as ``ConnectionHandler`` has it
        event = "node connected" if connected else "node disconnected"
        log.info(event, node_id=node.node_id, tenant=node.tenant, session_id=node.session_id)

    return written
