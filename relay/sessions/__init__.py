"""The WebSocket sessions of the nodes that are connected to this process.

Use::

    nodes = CapabilityLimits(fleet, node_sessions, monotonic)
    answer = nodes.start(command)  # raises ToolError; ``await answer`` is the node's
    one_way.send(node_id, OneWayType.TELEMETRY_LEASE, lease)
    node_sessions.end_sessions(lambda leaf: leaf.kid == revoked, CloseCode.REVOKED)
"""
