"""Identifies callers: agents' tokens, their issuers' keys, and the one table of permissions.

auth = assemble(environment, ca)
principal = await auth.authenticator.recognise(token)  # raises TokenError
if principal.rights.allow(node_tenant, safety_class): ...
auth.authenticator.revoke(jtis)
"""
