"""Identifies callers: agents' tokens, their issuers' keys, and the one table of permissions.

authenticator = Authenticator(verifier, keys, issuer=url, audiences=urls, now_ms=clock)
principal = await authenticator.recognise(token)  # raises TokenError
if principal.rights.allow(node_tenant, safety_class, kind): ...
authenticator.revoke(jtis)
"""
