"""The documents by which clients find the authorization server (RFC 8414), at every path that they try.

What they name exists, and no more. Must not read a request: the issuer is a setting.
"""

from typing import Any

from relay.auth.permissions import SCOPES
from relay.auth.signatures import ALGORITHMS
from relay.sign_in.clients import ASSERTION, NONE
from schemas.addresses import MCP_PATHS

AUTHORIZE, TOKEN, REGISTER, REVOKE = "/authorize", "/token", "/register", "/revoke"
_SERVER = "/.well-known/oauth-authorization-server"
_OPENID = "/.well-known/openid-configuration"
SERVER_PATHS = (
    _SERVER,
    _OPENID,
    *(f"{known}{path}" for known in (_SERVER, _OPENID) for path in MCP_PATHS),
    *(f"{path}{known}" for known in (_SERVER, _OPENID) for path in MCP_PATHS),
)
"""Where clients look that were given the relay's URL, or one of MCP: before, and behind its path."""
CLIENT_PATHS = frozenset({*SERVER_PATHS, TOKEN, REGISTER, REVOKE})
"""What programs request, and no browser by itself: none of these reads a cookie."""


def server_metadata(issuer: str, *, fetches: bool = True) -> dict[str, Any]:
    """Return the metadata of the authorization server ``issuer``; ``fetches``: it reads what clients publish.

    Those that are known it knows by their documents without that, but for their keys.
    """
    methods = [NONE, ASSERTION] if fetches else [NONE]
    metadata = {
        "issuer": issuer,
        "authorization_endpoint": issuer + AUTHORIZE,
        "token_endpoint": issuer + TOKEN,
        "registration_endpoint": issuer + REGISTER,
        "revocation_endpoint": issuer + REVOKE,
        "scopes_supported": [*SCOPES, "offline_access"],
        "response_types_supported": ["code"],
        "response_modes_supported": ["query"],
        "grant_types_supported": ["authorization_code", "refresh_token"],
        "code_challenge_methods_supported": ["S256"],
        # Claude takes a client's own document only where ``none`` is among these.
        "token_endpoint_auth_methods_supported": methods,
        "revocation_endpoint_auth_methods_supported": methods,
        "authorization_response_iss_parameter_supported": True,
        "client_id_metadata_document_supported": True,
    }
    if fetches:
        for endpoint in ("token", "revocation"):
            metadata[f"{endpoint}_endpoint_auth_signing_alg_values_supported"] = list(ALGORITHMS)
    return metadata
