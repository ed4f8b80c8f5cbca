"""What agents follow: the samples of nodes, shared by all that want them.

``assembly.assemble`` returns the part. Calls start streams by its ``hub``, which leases a capability from its
node and takes the node's frames. ``resource.read(principal, "node://ID/telemetry")`` returns the latest
sample as JSON, and ``resource.follow`` calls back with each. In a cluster, ``elsewhere`` and ``listening`` do
the same at the other relays.
"""
