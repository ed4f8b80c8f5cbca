"""The SDK's server, made to say of itself what is true; what it thinks of a request; whose a session is.

With ``mcp_server`` and ``mcp_resources`` all that imports the MCP SDK on the server side. Must not answer
anything.
"""

from functools import lru_cache
from typing import Any

import mcp_types as types
from mcp.server.auth.middleware.bearer_auth import AuthenticatedUser
from mcp.server.auth.provider import AccessToken
from mcp.server.context import ServerRequestContext
from mcp.server.lowlevel import NotificationOptions, Server
from mcp.server.models import InitializationOptions
from mcp.server.streamable_http import check_accept_headers
from mcp.shared.exceptions import MCPError
from mcp.shared.inbound import (
    MCP_METHOD_HEADER,
    MCP_NAME_HEADER,
    MCP_PROTOCOL_VERSION_HEADER,
    InboundModernRoute,
    classify_inbound_request,
)
from mcp_types.version import MODERN_PROTOCOL_VERSIONS
from starlette.requests import Request
from starlette.types import Scope

from relay.http.request_guard import HEADERS_IN_SCOPE, TOKEN_IN_SCOPE, TWICE

Context = ServerRequestContext[Any, Any]

_ROUTING_HEADERS = {
    name.encode("ascii"): name for name in (MCP_METHOD_HEADER, MCP_NAME_HEADER, MCP_PROTOCOL_VERSION_HEADER)
}
_MAX_ACCEPT = 256  # clients send some fifty characters


class SdkServer(Server[Any]):
    """The tools change; prompts and resources do not."""

    def get_capabilities(
        self,
        notification_options: NotificationOptions | None = None,
        experimental_capabilities: dict[str, dict[str, Any]] | None = None,
        extensions: dict[str, dict[str, Any]] | None = None,
        *,
        protocol_version: str | None = None,
    ) -> types.ServerCapabilities:
        """Return what the server can do, as the era of ``protocol_version`` says it."""
        # In the new era the SDK derives all three from the one method that serves them.
        capabilities = super().get_capabilities(
            notification_options, experimental_capabilities, extensions, protocol_version=protocol_version
        )
        capabilities.prompts = types.PromptsCapability(list_changed=False)
        capabilities.resources = types.ResourcesCapability(list_changed=False, subscribe=False)
        return capabilities

    def create_initialization_options(
        self,
        notification_options: NotificationOptions | None = None,
        experimental_capabilities: dict[str, dict[str, Any]] | None = None,
        extensions: dict[str, dict[str, Any]] | None = None,
    ) -> InitializationOptions:
        """Return what is said in answer to ``initialize``."""
        # Over HTTP the SDK asks for this without options, and would then deny that the list ever changes.
        options = notification_options or NotificationOptions(tools_changed=True)
        return super().create_initialization_options(options, experimental_capabilities, extensions)


@lru_cache(maxsize=1024)
def session_owner(issuer: str, tenant: str, sub: str) -> AuthenticatedUser:
    """Return who a session of the old era belongs to. The token itself must not get into this record."""
    claims = {"iss": issuer}
    owner = AccessToken(token="", client_id=f"{tenant}/{sub}", scopes=[], subject=sub, claims=claims)
    return AuthenticatedUser(owner)


def is_modern(protocol_version: str | None) -> bool:
    """Tell whether a version is of the new era, in which there are no sessions."""
    return protocol_version in MODERN_PROTOCOL_VERSIONS


def opens_session(scope: Scope) -> bool:
    """Tell whether a request can only be the first of a session of the old era."""
    headers = scope[HEADERS_IN_SCOPE]
    return b"mcp-session-id" not in headers and not is_modern(headers.get(b"mcp-protocol-version"))


def is_plain_call(scope: Scope, message: object) -> bool:
    """Tell whether a request is a call of the new era in which the SDK finds no fault.

    ``message`` is its body. By the SDK's own rules, and rather no than yes: on a no the SDK decides.
    """
    if not isinstance(message, dict) or message.get("method") != "tools/call":
        return False
    headers = scope[HEADERS_IN_SCOPE]
    if not headers.get(b"content-type", "").lower().startswith("application/json"):
        return False
    accept = headers.get(b"accept", "")
    if len(accept) > _MAX_ACCEPT or not _accepts_all(accept):
        return False
    if message.get("jsonrpc") != "2.0" or type(message.get("id")) not in {int, str}:
        return False
    routing = {name: headers[key] for key, name in _ROUTING_HEADERS.items() if key in headers}
    if TWICE in routing.values():
        return False
    return isinstance(classify_inbound_request(message, headers=routing), InboundModernRoute)


@lru_cache(maxsize=256)  # a client says the same each time
def _accepts_all(accept: str) -> bool:
    """Tell whether a client takes an answer that is whole, and one that is a stream."""
    headers = [(b"accept", accept.encode("latin-1"))]
    return all(check_accept_headers(Request({"type": "http", "headers": headers})))


def connection_of(context: Context) -> Any:
    """Return what lasts as long as a session of the old era does."""
    # The SDK has no public way to keep something for a session, nor to learn that it ended.
    return context.session._connection  # noqa: SLF001


def request_of(context: Context) -> Request:
    """Return the HTTP request that a message came in."""
    if context.request is None:
        raise MCPError(types.INTERNAL_ERROR, "this transport brings no request")
    request: Request = context.request
    return request


def token_of(context: Context) -> str:
    """Return the token that the guard has accepted."""
    token: str = request_of(context).scope[TOKEN_IN_SCOPE]
    return token
