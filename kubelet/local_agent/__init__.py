"""``kubelet mcp``: the MCP server of an agent that runs on this node. A process and an extra of its own."""
