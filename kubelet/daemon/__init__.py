"""``python -m kubelet.daemon``: the node put together, in a process of its own."""
