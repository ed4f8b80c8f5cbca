"""Identifies callers: agents' tokens, their issuers' keys, and the one table of permissions."""
