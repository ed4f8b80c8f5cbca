"""Adapts the MCP SDK: its server, and its own validation of requests.

Must not answer a method: ``methods`` does.
"""

import asyncio
from collections.abc import Awaitable, Callable, Container, Mapping
from functools import lru_cache
from typing import Any

import mcp_types as types
from mcp.server.auth.middleware.bearer_auth import AuthenticatedUser
from mcp.server.auth.provider import AccessToken
from mcp.server.context import ServerMiddleware, ServerRequestContext
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
from mcp_types.methods import serialize_server_result, validate_client_request
from mcp_types.version import MODERN_PROTOCOL_VERSIONS
from pydantic import BaseModel, ValidationError
from starlette.requests import Request
from starlette.types import Message

from relay.auth.agent_tokens import CALLER_IN_SCOPE, Caller
from relay.auth.permissions import Rights
from relay.calls.relay_tools import Emit, StreamClosedError
from relay.http.body_parser import MESSAGE_IN_SCOPE
from relay.http.request_guard import TWICE
from relay.mcp_api.methods import CALL_TOOL
from relay.settings.config import View

Context = ServerRequestContext[Any, Any]

EXCHANGE_IN_SCOPE = "edge.exchange"
"""The key of an ``Exchange`` in the scope of its request."""

_ROUTING_HEADERS = {
    name.encode("ascii"): name for name in (MCP_METHOD_HEADER, MCP_NAME_HEADER, MCP_PROTOCOL_VERSION_HEADER)
}
_MAX_ACCEPT = 256  # clients send some fifty characters
_OF_THE_NEW_ERA = ("ttlMs", "cacheScope")


class Exchange:
    """One HTTP request and its response.

    In the old era the SDK goes on with a call whose client has disconnected, since it might have resumed.
    """

    __slots__ = ("_over",)

    def __init__(self) -> None:
        self._over = asyncio.Event()

    @property
    def is_over(self) -> bool:
        """Whether the response has ended, or the client has disconnected."""
        return self._over.is_set()

    def end(self) -> None:
        """Note that it is over."""
        self._over.set()

    async def disconnected(self) -> Message:
        """Wait until it is over: what ``direct.until_disconnected`` takes as ``receive``."""
        await self._over.wait()
        return {"type": "http.disconnect"}


class _Notification(BaseModel):
    """A notification with any parameters: the SDK only dumps it."""

    method: str
    params: dict[str, Any]


class SdkServer(Server[Any]):
    """A server whose methods are answered in a middleware, and which declares its capabilities itself.

    Tools change, and so does telemetry; prompts and the set of resources do not. The SDK would derive that
    from handlers; it has none.

    Attributes:
        instructions_for: returns the instructions for callers with some rights, in a view.
    """

    def __init__(self, version: str, instructions: Callable[[Rights, View], str]) -> None:
        super().__init__(
            "edge-kubelet",
            version=version,
            title="Edge kubelet",
            # Headers that mirror arguments are opt-in by schema, and no schema of ours uses them. Otherwise
            # the SDK walks tools/list before each call of the new era.
            get_tool_input_schema=lambda _name: None,
        )

        self.instructions_for = instructions

    def serve(
        self,
        answer: ServerMiddleware[Any],
        listen: Callable[
            [Context, types.SubscriptionsListenRequestParams], Awaitable[types.SubscriptionsListenResult]
        ],
        set_level: Callable[[Context, types.SetLevelRequestParams], Awaitable[types.EmptyResult]],
    ) -> None:
        """Make ``answer`` the middleware, and the others the handlers of what it does not answer."""
        self.middleware = [answer]
        self.add_request_handler("logging/setLevel", types.SetLevelRequestParams, set_level)
        self.add_request_handler("subscriptions/listen", types.SubscriptionsListenRequestParams, listen)

    def discovered(self, rights: Rights, view: View) -> dict[str, Any]:
        """Return the result of ``server/discover``, without what is added to every result of the new era.

        The SDK marks it as private to its caller, as it must be: the instructions hold the tenant's labels.
        """
        (version,) = MODERN_PROTOCOL_VERSIONS
        result = types.DiscoverResult(
            supported_versions=[version],
            capabilities=self.get_capabilities(protocol_version=version),
            instructions=self.instructions_for(rights, view),
        )
        dumped = result.model_dump(by_alias=True, mode="json", exclude_none=True)
        return serialize_server_result("server/discover", version, dumped)

    def get_capabilities(
        self,
        notification_options: NotificationOptions | None = None,
        experimental_capabilities: dict[str, dict[str, Any]] | None = None,
        extensions: dict[str, dict[str, Any]] | None = None,
        *,
        protocol_version: str | None = None,
    ) -> types.ServerCapabilities:
        """Return what the server can do."""
        capabilities = super().get_capabilities(
            notification_options, experimental_capabilities, extensions, protocol_version=protocol_version
        )
        capabilities.tools = types.ToolsCapability(list_changed=True)
        capabilities.prompts = types.PromptsCapability(list_changed=False)
        capabilities.resources = types.ResourcesCapability(list_changed=False, subscribe=True)
        return capabilities

    def create_initialization_options(
        self,
        notification_options: NotificationOptions | None = None,
        experimental_capabilities: dict[str, dict[str, Any]] | None = None,
        extensions: dict[str, dict[str, Any]] | None = None,
    ) -> InitializationOptions:
        """Return the options of the answer to ``initialize``."""
        # Over HTTP the SDK calls this without options, and would declare that the list never changes.
        options = notification_options or NotificationOptions(tools_changed=True)
        return super().create_initialization_options(options, experimental_capabilities, extensions)


class Eras:
    """The form of a result in each era of the protocol."""

    def __init__(self, server: SdkServer) -> None:
        self._stamp = {types.SERVER_INFO_META_KEY: server.server_info_stamp}

    def shaped(self, result: dict[str, Any], *, modern: bool) -> dict[str, Any]:
        """Return ``result`` in the form of its era, as the SDK's models do."""
        if modern:
            meta = {**result.get("_meta", {}), **self._stamp}
            return {**result, "resultType": "complete", "_meta": meta}
        return {name: value for name, value in result.items() if name not in _OF_THE_NEW_ERA}


@lru_cache(maxsize=1024)
def session_owner(issuer: str, tenant: str, sub: str) -> AuthenticatedUser:
    """Return the owner of a session of the old era. It must not contain the token."""
    claims = {"iss": issuer}
    owner = AccessToken(token="", client_id=f"{tenant}/{sub}", scopes=[], subject=sub, claims=claims)
    return AuthenticatedUser(owner)


def is_modern(protocol_version: str | None) -> bool:
    """Return whether a version is of the new era, which has no sessions."""
    return protocol_version in MODERN_PROTOCOL_VERSIONS


def opens_session(caller: Caller) -> bool:
    """Return whether a request can only be the first of a session of the old era."""
    headers = caller.headers
    return b"mcp-session-id" not in headers and not is_modern(headers.get(b"mcp-protocol-version"))


def takes(method: str, protocol_version: str, params: Mapping[str, Any] | None) -> bool:
    """Return whether the SDK accepts the parameters of ``method``; the gateway checks those of a call."""
    if method == CALL_TOOL:
        return True
    try:
        validate_client_request(method, protocol_version, params)
    except (KeyError, ValidationError):
        return False
    return True


def answers_once(caller: Caller, message: Mapping[str, Any], methods: Container[str]) -> bool:
    """Return whether a request is of the new era, for one of ``methods``, and valid to the SDK.

    ``message`` is its body. By the SDK's own rules, and false in doubt: then the SDK decides.
    """
    method = message.get("method")
    if not isinstance(method, str) or method not in methods:
        return False
    headers = caller.headers
    if not headers.get(b"content-type", "").lower().startswith("application/json"):
        return False
    accept = headers.get(b"accept", "")
    if len(accept) > _MAX_ACCEPT or not _accepts_both(accept):
        return False
    if message.get("jsonrpc") != "2.0" or type(message.get("id")) not in {int, str}:
        return False
    routing = {name: headers[key] for key, name in _ROUTING_HEADERS.items() if key in headers}
    if TWICE in routing.values():
        return False
    route = classify_inbound_request(message, headers=routing)
    return isinstance(route, InboundModernRoute) and takes(
        method, route.protocol_version, message.get("params")
    )


@lru_cache(maxsize=256)  # a client sends the same each time
def _accepts_both(accept: str) -> bool:
    """Return whether a client accepts both JSON and a stream."""
    headers = [(b"accept", accept.encode("latin-1"))]
    return all(check_accept_headers(Request({"type": "http", "headers": headers})))


def connection_of(context: Context) -> Any:
    """Return the SDK's connection, which lives as long as a session of the old era."""
    # The SDK has no public way to keep state of a session, nor to learn that it ended.
    return context.session._connection  # noqa: SLF001


def caller_of(context: Context) -> Caller:
    """Return the caller of a message."""
    caller: Caller = _request_of(context).scope[CALLER_IN_SCOPE]
    return caller


def message_of(context: Context) -> Mapping[str, Any]:
    """Return a message as it was received, with the members that the SDK drops."""
    message: Mapping[str, Any] = _request_of(context).scope[MESSAGE_IN_SCOPE]
    return message


def exchange_of(context: Context) -> Exchange:
    """Return the HTTP request of a message."""
    exchange: Exchange = _request_of(context).scope[EXCHANGE_IN_SCOPE]
    return exchange


def emitter_of(context: Context) -> Emit:
    """Return what sends notifications on the response stream of a message."""
    exchange = exchange_of(context)

    async def emit(method: str, params: Mapping[str, Any]) -> None:
        if exchange.is_over:
            raise StreamClosedError
        notification: Any = _Notification(method=method, params=dict(params))
        await context.session.send_notification(notification, context.request_id)

    return emit


def _request_of(context: Context) -> Request:
    if context.request is None:
        raise MCPError(types.INTERNAL_ERROR, "this transport brings no request")
    request: Request = context.request
    return request
