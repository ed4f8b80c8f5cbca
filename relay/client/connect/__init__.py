"""Puts a relay into the configuration of an MCP client on this machine, and takes it out again."""
