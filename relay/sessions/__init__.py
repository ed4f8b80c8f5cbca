"""The WebSocket sessions of the nodes that are connected to this process.

Use::

    part = assemble(environment, audit, pki, fleet)
    answer = part.router.start(command)  # raises ToolError; ``await answer`` is the node's
    part.frames.send(node_id, OneWayType.TELEMETRY_LEASE, lease)
    part.node_sessions.end_sessions(lambda leaf: leaf.kid == revoked, CloseCode.REVOKED)
"""
