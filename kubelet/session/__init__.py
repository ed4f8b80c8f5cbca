"""The node's one outbound WebSocket to the relay."""
