"""Who calls: agents' tokens, their issuers' keys, and the one table of permissions."""
