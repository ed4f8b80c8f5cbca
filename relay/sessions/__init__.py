"""The WebSocket sessions of the nodes that are connected to this process."""
