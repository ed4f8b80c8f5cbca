"""MCP on top of the one door: Streamable HTTP in both protocol eras.

With ``mcp_sdk`` and ``mcp_resources`` all that imports the MCP SDK on the server side. ``tools/list`` and
``tools/call`` are answered in a middleware: the SDK's typed models would drop ``x-safety-class``, and the way
through them takes twice as long. A plain call does not even get there (``mcp_calls``). Must not decide
anything: who may call what is the door's, and what is listed is the fleet's.
"""

import asyncio
from collections.abc import Callable, Collection
from contextlib import AbstractAsyncContextManager, ExitStack
from typing import Any

import mcp_types as types
from mcp.server.context import CallNext, HandlerResult
from mcp.server.streamable_http_manager import StreamableHTTPSessionManager
from mcp.server.subscriptions import InMemorySubscriptionBus, ListenHandler, ToolsListChanged
from mcp.shared.exceptions import MCPError
from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from relay.auth.agent_tokens import Authenticator, Principal
from relay.calls.call_record import CallAnswer, CallRequest
from relay.calls.envelope import Call
from relay.calls.gateway import CallGateway
from relay.fleet.change_notifier import ChangeNotifier
from relay.fleet.fleet import Fleet
from relay.http.body_parser import MAX_BODY_BYTES, MESSAGE_IN_SCOPE, SIZE_IN_SCOPE, BodyParser
from relay.http.request_guard import HEADERS_IN_SCOPE, TOKEN_IN_SCOPE
from relay.mcp_api import direct
from relay.mcp_api.open_streams import NoRoomError, OpenStreams
from relay.mcp_api.paging import CursorError, page_of
from relay.mcp_api.resource_methods import BYTES_LIKE_A_CALL, LIST_TTL_MS, McpResources
from relay.mcp_api.resources import ResourceCatalog
from relay.mcp_api.sdk import (
    Context,
    SdkServer,
    connection_of,
    is_modern,
    is_plain_call,
    opens_session,
    request_of,
    session_owner,
    token_of,
)
from schemas.errors import ToolError
from schemas.tokens import TokenError

META_ERROR = "edge-kubelet/error"
TRANSPORT_HEADER = b"edge-transport"
"""What the stdio bridge says of itself; it only goes into the log."""
SESSION_IDLE_S = 300

_NO_ROOM = "Too many sessions and subscriptions are open; close one."
_PRINCIPAL_IN_SCOPE = "edge.principal"
_TOLD = "told"  # under which a session of the old era keeps what tells it of changes
_TOOLS_LIKE_A_CALL = 20  # listing so many costs about as much as one call

_INSTRUCTIONS = (
    "Each tool is one capability of one Linux node, named kind.node.capability.verb. "
    "Errors are JSON with code, message and suggested_fix; do what suggested_fix says."
)


class McpEndpoint:
    """The MCP side of one relay: an ASGI application for ``/mcp``."""

    def __init__(  # noqa: PLR0913 - what comes in from outside
        self,
        *,
        version: str,
        gateway: CallGateway,
        fleet: Fleet,
        authenticator: Authenticator,
        notifier: ChangeNotifier,
        resources: ResourceCatalog,
        streams: OpenStreams,
        now_ms: Callable[[], int],
    ) -> None:
        self._gateway = gateway
        self._fleet = fleet
        self._authenticator = authenticator
        self._notifier = notifier
        self._now_ms = now_ms
        self._streams = streams
        self._bodies = BodyParser(self._serve, self._charge_body)
        readable = McpResources(resources, self._principal, self._charge)
        server = SdkServer(
            "edge-kubelet",
            version=version,
            title="Edge kubelet",
            instructions=_INSTRUCTIONS,
            # Headers that mirror arguments are opt-in by schema, and none of ours asks for them.
            get_tool_input_schema=lambda _name: None,
            on_list_tools=_answered_before,
            on_call_tool=_answered_before,
            on_subscriptions_listen=self._listen,
            on_list_resources=readable.list,
            on_list_resource_templates=readable.templates,
            on_read_resource=readable.read,
            on_list_prompts=_list_prompts,
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
        # Before the body, for which a client may take so long that its token has ended when it is whole.
        principal = scope[_PRINCIPAL_IN_SCOPE] = self._authenticator.identify(scope[TOKEN_IN_SCOPE])
        scope["user"] = session_owner(*principal.name)
        await self._bodies(scope, receive, send)

    def _charge_body(self, scope: Scope, size: int) -> None:
        # A call has its own price; a body that is larger than one has to be costs more to parse than that.
        if size > BYTES_LIKE_A_CALL:
            self._gateway.charge(scope[_PRINCIPAL_IN_SCOPE], size / BYTES_LIKE_A_CALL)

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        principal: Principal = scope[_PRINCIPAL_IN_SCOPE]
        if is_plain_call(scope, scope.get(MESSAGE_IN_SCOPE)):
            await direct.answer(self._called(scope, modern=True), scope, receive, send)
            return
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
        release = self._streams.hold(principal)
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
                return await self._called(request_of(ctx).scope, modern=is_modern(ctx.protocol_version))
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

    async def _called(self, scope: Scope, *, modern: bool) -> dict[str, Any]:
        headers = scope[HEADERS_IN_SCOPE]
        request = CallRequest(
            token=scope[TOKEN_IN_SCOPE],
            call=Call(scope[MESSAGE_IN_SCOPE], headers.get(b"traceparent")),
            transport="stdio" if headers.get(TRANSPORT_HEADER) == "stdio" else "http",
            input_bytes=scope[SIZE_IN_SCOPE],
        )
        return self._shaped(_tool_result(await self._gateway.call(request)), modern=modern)

    def _list(self, context: Context) -> dict[str, Any]:
        principal = self._principal(context)
        dashed = _wants_dashed(context)
        self._charge(principal, 1)
        tools = self._fleet.listed(principal.rights)
        try:
            page, following = page_of(tools, (context.params or {}).get("cursor"))
        except CursorError as error:
            raise MCPError(types.INVALID_PARAMS, str(error)) from None
        self._charge(principal, len(page) / _TOOLS_LIKE_A_CALL)
        result: dict[str, Any] = {"tools": [tool.listed(dashed=dashed) for tool in page]}
        if following is not None:
            result["nextCursor"] = following
        modern = is_modern(context.protocol_version)
        if modern:
            result |= {"ttlMs": LIST_TTL_MS, "cacheScope": "private"}
        return self._shaped(result, modern=modern)

    def _shaped(self, result: dict[str, Any], *, modern: bool) -> dict[str, Any]:
        """Add what the SDK would have added to a result that came through it."""
        if modern:
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

    def _count(self, context: Context) -> None:
        """Count a session of the old era for as long as it lasts; what it is told ends with its token."""
        connection = connection_of(context)
        if _TOLD in connection.state:
            return  # a client may begin as often as it likes: one session takes one place
        told = connection.state[_TOLD] = ExitStack()
        release = self._streams.hold(self._principal(context), told.close)
        connection.exit_stack.callback(release)

    def _follow(self, context: Context) -> None:
        """Tell a session of the old era about changes for as long as it lasts, and its token is good."""
        connection, principal = connection_of(context), self._principal(context)
        if connection.state.setdefault("followed_since", context) is not context:
            return  # a client may say twice that it is ready
        stop = self._notifier.listen(principal.rights, context.session.send_tool_list_changed)
        told = connection.state.setdefault(_TOLD, ExitStack())
        told.callback(stop)
        ends_in_s = principal.expires_s - self._now_ms() / 1000
        ending = asyncio.get_running_loop().call_later(ends_in_s, told.close)
        connection.exit_stack.callback(ending.cancel)
        connection.exit_stack.callback(stop)

    def _charge(self, principal: Principal, cost: float) -> None:
        try:
            self._gateway.charge(principal, cost)
        except ToolError as error:
            raise MCPError(types.INTERNAL_ERROR, str(error), error.envelope()) from None

    def _principal(self, context: Context) -> Principal:
        try:
            return self._authenticator.identify(token_of(context))
        except TokenError:
            raise MCPError(types.INVALID_PARAMS, "the token is no longer accepted; get a new one") from None


async def _list_prompts(_context: Context, _params: object) -> types.ListPromptsResult:
    return types.ListPromptsResult(prompts=[], cache_scope="private")


async def _answered_before(_context: Context, _params: object) -> Any:
    """Stand for a method that the middleware answers: the SDK advertises what has a handler."""
    raise MCPError(types.INTERNAL_ERROR, "answered by the middleware")


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
    names = request_of(context).query_params.get("names", "dotted")
    if names not in {"dotted", "dashed"}:
        raise MCPError(types.INVALID_PARAMS, "names must be dotted or dashed")
    return names == "dashed"
