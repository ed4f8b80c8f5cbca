"""MCP in both protocol eras. The only server-side code that imports the MCP SDK."""
