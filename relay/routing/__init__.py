"""The interfaces between calls and the relay that holds a node's session.

Its use:

    ack = await router.run(Command(node_id, tool, arguments, deadline_ms, correlation_id))
    frames.on_connection(lambda node, connected: ...)
    frames.send(node_id, OneWayType.TELEMETRY_LEASE, payload)
"""
