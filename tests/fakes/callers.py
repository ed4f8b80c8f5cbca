"""Callers as the request guard makes them, and calls as a transport brings them."""

import json
from typing import Any

from relay.auth.agent_tokens import Caller, Principal
from relay.calls.envelope import Call
from relay.calls.executor import CallRequest
from relay.state.tokens import key_id
from schemas.keys import from_base64url
from tests.fakes.signer import TENANT, key_named

TOKEN_KEY = key_named("the relay's token key")
_PUBLIC = bytes(TOKEN_KEY.verify_key)


def principal_of(token: str) -> Principal:
    """Return the principal of ``token``, unverified; one without rights if it is no token."""
    try:
        header, claims = (json.loads(from_base64url(part)) for part in token.split(".")[:2])
    except ValueError:
        return Principal("", "", token, "", frozenset(), 0, "", b"")
    return Principal(
        tenant=claims["tenant"],
        sub=claims["sub"],
        jti=claims["jti"],
        issuer=claims["iss"],
        scopes=frozenset(claims["scope"].split(" ")),
        expires_s=claims["exp"],
        kid=header["kid"],
        key=_PUBLIC if header["kid"] == key_id(_PUBLIC) else b"",
        kinds=tuple(claims["kinds"]) if "kinds" in claims else None,
        nodes=tuple(claims["nodes"]) if "nodes" in claims else None,
    )


def principal(tenant: str = TENANT, *scopes: str, sub: str = "agent-1", jti: str = "jti-1") -> Principal:
    """Return an agent that may read, or what ``scopes`` allow."""
    allowed = frozenset(scopes or ["tools:call:read_only"])
    return Principal(tenant, sub, jti, "https://relay.example", allowed, 0, "kid-1", b"")


def request_of(token: str, message: dict[str, Any], transport: str = "http") -> CallRequest:
    """Return a call as it comes from the body parser."""
    size = len(json.dumps(message, default=str))
    return CallRequest(Caller(principal_of(token), transport, {}, size=size), Call(message))


def call_of(token: str, name: object, arguments: object, **meta: object) -> CallRequest:
    params: dict[str, object] = {"name": name, "arguments": arguments}
    if meta:
        params["_meta"] = {key.replace("__", "/").replace("_", "-"): value for key, value in meta.items()}
    return request_of(token, {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": params})
