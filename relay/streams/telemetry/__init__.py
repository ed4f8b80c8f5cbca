"""What agents follow: the samples of nodes, shared by all that want them.

Calls start streams by ``TelemetryHub``, which leases a capability from its node and takes the node's frames.
``await resource.read(principal, "node://ID/telemetry")`` returns the latest sample as JSON, and
``resource.follow`` calls back with each; in a cluster, of all its relays.
"""
