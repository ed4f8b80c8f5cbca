"""The guarded client of an agent runtime, for any MCP server; its face is ``relay.remote_tools``."""
