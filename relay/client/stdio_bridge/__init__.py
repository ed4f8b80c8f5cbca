"""MCP on standard input and output, bridged to a relay that runs elsewhere."""
