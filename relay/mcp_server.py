"""MCP on top of the one door: Streamable HTTP in both protocol eras.

The only module of the server side that imports the MCP SDK. ``tools/list`` and ``tools/call`` are answered
in a middleware: the SDK's typed models would drop ``x-safety-class``, and the way through them takes twice
as long. Must not decide anything: who may call what is the door's, and what is listed is the fleet's.
"""

import asyncio
from collections.abc import Callable, Collection
from contextlib import AbstractAsyncContextManager
from typing import Any

import mcp_types as types
from mcp.server.context import CallNext, HandlerResult
from mcp.server.streamable_http_manager import StreamableHTTPSessionManager
from mcp.server.subscriptions import InMemorySubscriptionBus, ListenHandler, ToolsListChanged
from mcp.shared.exceptions import MCPError
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from relay.auth import Authenticator, Principal
from relay.calls import CallAnswer, CallRequest, Door
from relay.fleet import Fleet
from relay.guard import TOKEN_IN_SCOPE
from relay.mcp_sdk import Context, HonestServer, connection_of, is_modern, opens_session, session_owner
from relay.notifier import Notifier
from relay.paging import CursorError, page_of
from relay.resources import TEMPLATES, ResourceCatalog
from relay.streams import NoRoomError, Streams
from schemas.errors import ToolError
from schemas.text import printable
from schemas.tokens import TokenError

META_ERROR = "edge-kubelet/error"
LIST_TTL_MS = 5000
MAX_BODY_BYTES = 1024 * 1024
SESSION_IDLE_S = 300

_NO_ROOM = "Too many sessions and subscriptions are open; close one."
_TOOLS_LIKE_A_CALL = 20  # listing so many costs about as much as one call

_INSTRUCTIONS = (
    "Each tool is one capability of one Linux node, named kind.node.capability.verb. "
    "Errors are JSON with code, message and suggested_fix; do what suggested_fix says."
)


class McpServer:
    """The MCP side of one relay: an ASGI application for ``/mcp``."""

    def __init__(  # noqa: PLR0913 - what comes in from outside
        self,
        *,
        version: str,
        door: Door,
        fleet: Fleet,
        authenticator: Authenticator,
        notifier: Notifier,
        resources: ResourceCatalog,
        streams: Streams,
        now_ms: Callable[[], int],
    ) -> None:
        self._door = door
        self._fleet = fleet
        self._authenticator = authenticator
        self._notifier = notifier
        self._resources = resources
        self._now_ms = now_ms
        self._streams = streams
        server = HonestServer(
            "edge-kubelet",
            version=version,
            title="Edge kubelet",
            instructions=_INSTRUCTIONS,
            # Headers that mirror arguments are opt-in by schema, and none of ours asks for them.
            get_tool_input_schema=lambda _name: None,
            on_list_tools=_answered_before,
            on_call_tool=_answered_before,
            on_subscriptions_listen=self._listen,
            on_list_resources=self._list_resources,
            on_list_resource_templates=self._list_templates,
            on_read_resource=self._read_resource,
            on_list_prompts=self._list_prompts,
        )
        server.middleware = [self._answer]
        self._stamp = {types.SERVER_INFO_META_KEY: server.server_info_stamp}
        self._manager = StreamableHTTPSessionManager(
            app=server,
            # Host and Origin are checked in front of every route, this one among them.
            security_settings=None,
            max_request_body_size=MAX_BODY_BYTES,
            # Sessions of the old era are few enough to be worth forgetting soon; an open stream is not idle.
            session_idle_timeout=SESSION_IDLE_S,
        )

    def running(self) -> AbstractAsyncContextManager[None]:
        """Return the context in which requests can be served."""
        return self._manager.run()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one HTTP request, whose token the guard has put into the scope and identified."""
        principal = self._authenticator.identify(scope[TOKEN_IN_SCOPE])
        scope["user"] = session_owner(*principal.name)
        if not opens_session(scope):
            await self._manager.handle_request(scope, receive, send)
            return
        try:
            self._streams.check(principal)
        except NoRoomError:
            refusal = JSONResponse({"error": "sessions", "message": _NO_ROOM}, status_code=429)
            await refusal(scope, receive, send)
            return
        # Counted from the first byte: the SDK keeps room for a session before it has read who opens it.
        release = self._streams.hold(principal, _nothing)
        try:
            await self._manager.handle_request(scope, receive, send)
        finally:
            release()

    def revoke(self, jtis: Collection[str]) -> None:
        """End the streams that were opened with one of these tokens."""
        self._streams.revoke(jtis)

    async def _answer(self, ctx: Context, call_next: CallNext) -> HandlerResult:
        match ctx.method:
            case "tools/call":
                return await self._call(ctx)
            case "tools/list":
                return self._list(ctx)
            case "initialize":
                self._count(ctx)
                return await call_next(ctx)
            case "notifications/initialized":
                result = await call_next(ctx)
                self._follow(ctx)
                return result
            case _:
                return await call_next(ctx)

    async def _call(self, context: Context) -> dict[str, Any]:
        params = context.params or {}
        name = params.get("name")
        if not isinstance(name, str):
            raise MCPError(types.INVALID_PARAMS, "name must be a string")
        arguments = params.get("arguments")
        request = CallRequest(_token(context), name, {} if arguments is None else arguments)
        return self._shaped(context, _tool_result(await self._door.call(request)))

    def _list(self, context: Context) -> dict[str, Any]:
        principal = self._principal(context)
        dashed = _wants_dashed(context)
        tools = self._fleet.listed(principal.rights)
        self._charge(principal, 1 + len(tools) / _TOOLS_LIKE_A_CALL)
        try:
            page, following = page_of(tools, (context.params or {}).get("cursor"))
        except CursorError as error:
            raise MCPError(types.INVALID_PARAMS, str(error)) from None
        result: dict[str, Any] = {
            "tools": [tool.listed(dashed=dashed) for tool in page],
        }
        if following is not None:
            result["nextCursor"] = following
        if is_modern(context.protocol_version):
            result |= {"ttlMs": LIST_TTL_MS, "cacheScope": "private"}
        return self._shaped(context, result)

    def _shaped(self, context: Context, result: dict[str, Any]) -> dict[str, Any]:
        """Add what the SDK would have added to a result that came through it."""
        if is_modern(context.protocol_version):
            result["resultType"] = "complete"
            result["_meta"] = {**result.get("_meta", {}), **self._stamp}
        return result

    async def _listen(
        self, context: Context, params: types.SubscriptionsListenRequestParams
    ) -> types.SubscriptionsListenResult:
        """Serve a subscription of the new era until the client goes, or its token ends."""
        principal = self._principal(context)
        try:
            self._streams.check(principal)
        except NoRoomError:
            raise MCPError(types.INTERNAL_ERROR, _NO_ROOM) from None
        bus = InMemorySubscriptionBus()
        handler = ListenHandler(bus)
        stop = self._notifier.listen(principal.rights, lambda: bus.publish(ToolsListChanged()))
        ends_in_s = principal.expires_s - self._now_ms() / 1000
        ending = asyncio.get_running_loop().call_later(ends_in_s, handler.close)
        release = self._streams.hold(principal, handler.close)
        try:
            return await handler(context, params)
        finally:
            release()
            ending.cancel()
            stop()

    async def _list_resources(self, context: Context, _params: object) -> types.ListResourcesResult:
        listed = self._resources.listed(self._principal(context))
        resources = [
            types.Resource(
                uri=item.uri, name=item.name, mime_type=item.mime_type, description=item.description
            )
            for item in listed
        ]
        return types.ListResourcesResult(resources=resources, ttl_ms=LIST_TTL_MS, cache_scope="private")

    async def _list_templates(self, _context: Context, _params: object) -> types.ListResourceTemplatesResult:
        templates = [
            types.ResourceTemplate(uri_template=uri, name=name, mime_type=mime_type, description=description)
            for name, (uri, mime_type, description) in TEMPLATES.items()
        ]
        return types.ListResourceTemplatesResult(resource_templates=templates, cache_scope="private")

    async def _read_resource(
        self, context: Context, params: types.ReadResourceRequestParams
    ) -> types.ReadResourceResult:
        uri = str(params.uri)
        content = self._resources.read(self._principal(context), uri)
        if content is None:
            raise MCPError(types.INVALID_PARAMS, "Resource not found", {"uri": printable(uri)})
        text = types.TextResourceContents(uri=uri, mime_type=content.mime_type, text=content.text)
        return types.ReadResourceResult(contents=[text], cache_scope="private")

    async def _list_prompts(self, _context: Context, _params: object) -> types.ListPromptsResult:
        return types.ListPromptsResult(prompts=[], cache_scope="private")

    def _count(self, context: Context) -> None:
        """Count a session of the old era for as long as it lasts."""
        release = self._streams.hold(self._principal(context), _nothing)
        connection_of(context).exit_stack.callback(release)

    def _follow(self, context: Context) -> None:
        """Tell a session of the old era about changes for as long as it lasts, and its token is good."""
        connection, principal = connection_of(context), self._principal(context)
        if connection.state.setdefault("followed_since", context) is not context:
            return  # a client may say twice that it is ready
        stop = self._notifier.listen(principal.rights, context.session.send_tool_list_changed)
        release = self._streams.hold(principal, stop)
        connection.exit_stack.callback(stop)
        connection.exit_stack.callback(release)

    def _charge(self, principal: Principal, cost: float) -> None:
        try:
            self._door.charge(principal, cost)
        except ToolError as error:
            raise MCPError(types.INTERNAL_ERROR, str(error), error.envelope()) from None

    def _principal(self, context: Context) -> Principal:
        try:
            return self._authenticator.identify(_token(context))
        except TokenError:
            raise MCPError(types.INVALID_PARAMS, "the token is no longer accepted; get a new one") from None


def _nothing() -> None:
    """End nothing: a session whose token is revoked is refused with its next request."""


async def _answered_before(_context: Context, _params: object) -> Any:
    """Stand for a method that the middleware answers: the SDK advertises what has a handler."""
    raise MCPError(types.INTERNAL_ERROR, "answered by the middleware")


def _request(context: Context) -> Request:
    if context.request is None:
        raise MCPError(types.INTERNAL_ERROR, "this transport brings no request")
    request: Request = context.request
    return request


def _token(context: Context) -> str:
    token: str = _request(context).scope[TOKEN_IN_SCOPE]
    return token


def _tool_result(answer: CallAnswer) -> dict[str, Any]:
    content = [{"type": "text", "text": answer.text}]
    if answer.error is not None:
        # Not in structuredContent: clients check that against the tool's output schema, even of an error.
        return {
            "content": content,
            "isError": True,
            "_meta": {META_ERROR: answer.error},
        }
    return {"content": content, "structuredContent": answer.result, "isError": False}


def _wants_dashed(context: Context) -> bool:
    names = _request(context).query_params.get("names", "dotted")
    if names not in {"dotted", "dashed"}:
        raise MCPError(types.INVALID_PARAMS, "names must be dotted or dashed")
    return names == "dashed"
