"""Adapts the MCP SDK: its server, what that says of itself to agents, and the context of a message.

Must not answer a method: ``methods`` does. What agents read here must not contain anything that a node sent.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping
from functools import lru_cache
from typing import Any

import mcp_types as types
from mcp.server.context import ServerMiddleware, ServerRequestContext
from mcp.server.lowlevel import NotificationOptions, Server
from mcp.server.models import InitializationOptions
from mcp.shared.exceptions import MCPError
from mcp_types.methods import serialize_server_result
from mcp_types.version import MODERN_PROTOCOL_VERSIONS
from pydantic import BaseModel
from starlette.requests import Request

from relay.auth.agent_tokens import CALLER_IN_SCOPE, Caller
from relay.auth.permissions import Rights
from relay.calls.relay_tools import Emit, StreamClosedError
from relay.fleet.fleet import Fleet
from relay.http.body_parser import MESSAGE_IN_SCOPE
from schemas.addresses import View

MAX_BYTES = 1500
"""Clients cut instructions at two kilobytes."""

_STATIC = (
    "Each tool is one capability of one Linux node, named kind.node.capability.verb; or, named kind.verb, "
    "it is for the node that its argument node names by label or id, and find_nodes finds nodes. "
    "subscribe starts sampling; it stops when the call with a progress token is cancelled, or when "
    "node://{node_id}/telemetry was not read or followed for three intervals, at least 30 seconds. "
    "Errors are JSON with code, message and suggested_fix; do what suggested_fix says."
)
_BEFORE = " The operator calls the nodes: "
_BEFORE_WITH_IDS = " The operator calls the nodes, whose ids in names of tools begin as said: "
_MORE = ", and more, which fleet://nodes lists"


def instructions(fleet: Fleet, rights: Rights, view: View) -> str:
    """Return what agents with ``rights`` read when they connect: at most ``MAX_BYTES`` in UTF-8.

    Clients that defer tools search it. The labels are the operator's, and each tenant reads its own alone. A
    tool of ``View.TOOLS`` has its node's id in its name and not the label: there both are named.
    """
    if not rights.may_read:
        return _STATIC
    with_ids = view is View.TOOLS
    # No label contains a quotation mark.
    nodes = (
        f'"{label}" ({fleet.names.beginning_of(rights.tenant, node_id)})' if with_ids else f'"{label}"'
        for label, node_id in fleet.reach.labels(rights)
    )
    return _STATIC + _sentence(_BEFORE_WITH_IDS if with_ids else _BEFORE, nodes, MAX_BYTES - len(_STATIC))


def _sentence(before: str, nodes: Iterator[str], limit: int) -> str:
    """Return the sentence with as many of ``nodes`` as fit into ``limit``; empty if there are none."""
    first = next(nodes, None)
    if first is None:
        return ""
    text = before + first
    for node in nodes:
        if len(f"{text}, {node}{_MORE}.".encode()) > limit:
            return f"{text}{_MORE}."
        text += f", {node}"
    return f"{text}."


Context = ServerRequestContext[Any, Any]

OVER_IN_SCOPE = "edge.over"
"""The key of the event that is set when the response has ended, or the client has disconnected.

In the old era the SDK goes on with a call whose client has disconnected, since it might have resumed.
"""


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
        # The SDK's models take longer than a call.
        self._discovered_with = lru_cache(maxsize=64)(self._discovery)

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
        return self._discovered_with(self.instructions_for(rights, view))

    def _discovery(self, instructions: str) -> dict[str, Any]:
        (version,) = MODERN_PROTOCOL_VERSIONS
        result = types.DiscoverResult(
            supported_versions=[version],
            capabilities=self.get_capabilities(protocol_version=version),
            instructions=instructions,
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
        # Over HTTP the SDK calls this without options, and would declare that the list never changes.
        options = notification_options or NotificationOptions(tools_changed=True)
        return super().create_initialization_options(options, experimental_capabilities, extensions)


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


def over_of(context: Context) -> asyncio.Event:
    """Return the event of the end of a message's HTTP request."""
    over: asyncio.Event = _request_of(context).scope[OVER_IN_SCOPE]
    return over


def emitter_of(context: Context) -> Emit:
    """Return what sends notifications on the response stream of a message."""
    over = over_of(context)

    async def emit(method: str, params: Mapping[str, Any]) -> None:
        if over.is_set():
            raise StreamClosedError
        notification: Any = _Notification(method=method, params=dict(params))
        await context.session.send_notification(notification, context.request_id)

    return emit


def _request_of(context: Context) -> Request:
    if context.request is None:
        raise MCPError(types.INTERNAL_ERROR, "this transport brings no request")
    request: Request = context.request
    return request
