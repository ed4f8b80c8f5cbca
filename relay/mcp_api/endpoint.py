"""``/mcp`` and the paths below it: Streamable HTTP in both protocol eras, over one table of methods.

A request of the new era that has one result is answered here, without ASGI: the SDK prepares every answer to
become a stream, which takes such a request twice as long (docs/decisions/0021, 0036). What ASGI serves goes
to the SDK, whose middleware reads the same table: the SDK's typed models would drop ``x-safety-class``. Must
not decide anything: the gateway decides who may call what, and the fleet what is listed.
"""

import asyncio
from collections.abc import Collection, Coroutine, Mapping
from contextlib import AbstractAsyncContextManager
from functools import lru_cache, partial
from types import TracebackType
from typing import Any, TypeVar

import mcp_types as types
from attrs import define, field
from mcp.server.auth.middleware.bearer_auth import AuthenticatedUser
from mcp.server.auth.provider import AccessToken
from mcp.server.context import CallNext, HandlerResult
from mcp.server.streamable_http import REQUEST_CANCELLED, check_accept_headers
from mcp.server.streamable_http_manager import StreamableHTTPSessionManager
from mcp.shared.exceptions import MCPError
from mcp.shared.inbound import (
    ERROR_CODE_HTTP_STATUS,
    MCP_METHOD_HEADER,
    MCP_NAME_HEADER,
    MCP_PROTOCOL_VERSION_HEADER,
    InboundModernRoute,
    classify_inbound_request,
)
from mcp_types.methods import validate_client_request
from mcp_types.version import MODERN_PROTOCOL_VERSIONS
from pydantic import ValidationError
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import Message, Receive, Scope, Send

from relay.ascii_json import encoded
from relay.auth.agent_tokens import CALLER_IN_SCOPE, Caller
from relay.calls.envelope import Call
from relay.http.body_parser import MAX_BODY_BYTES, BodyParser
from relay.http.http_protocol import HttpAnswer, PendingAnswer
from relay.http.request_guard import TWICE
from relay.mcp_api.change_streams import (
    RESOURCE_SUBSCRIPTIONS,
    TOO_MANY_STREAMS,
    ChangeStreams,
    StreamLimitError,
)
from relay.mcp_api.log_streams import LogStreams
from relay.mcp_api.methods import BYTES_LIKE_A_CALL, CALL_TOOL, MethodError, Methods
from relay.mcp_api.sdk import (
    OVER_IN_SCOPE,
    Context,
    SdkServer,
    call_of,
    caller_of,
    emitter_of,
    message_of,
    over_of,
)
from relay.mcp_api.tool_list import text_of, with_documents
from schemas.strict_json import StrictJsonError, loads

ResultT = TypeVar("ResultT")
_Work = Coroutine[Any, Any, dict[str, Any]]

SESSION_IDLE_S = 300
UNWATCHED_S = 0.1
"""How late a disconnect may be noticed. Most calls end earlier, and need no task that waits for one."""

_OK = 200
_ROUTING_HEADERS = {
    name.encode("ascii"): name for name in (MCP_METHOD_HEADER, MCP_NAME_HEADER, MCP_PROTOCOL_VERSION_HEADER)
}
_MAX_ACCEPT = 256  # clients send some fifty characters
_OF_THE_NEW_ERA = ("ttlMs", "cacheScope")


@define(eq=False, repr=False)
class McpEndpoint:
    """The MCP side of one relay: an ASGI application for the paths of MCP."""

    _server: SdkServer
    methods: Methods
    _changes: ChangeStreams
    _logs: LogStreams
    _stamp: Mapping[str, Any] = field(init=False)
    _bodies: BodyParser = field(init=False)
    _manager: StreamableHTTPSessionManager = field(init=False)

    def __attrs_post_init__(self) -> None:
        self._stamp = {types.SERVER_INFO_META_KEY: self._server.server_info_stamp}
        self._bodies = BodyParser(self._serve, self._charge_body)
        self._server.serve(self._answer, self._changes.listen, self._logs.set_level)
        self._manager = StreamableHTTPSessionManager(
            app=self._server,
            # The request guard checks Host and Origin for every route.
            security_settings=None,
            max_request_body_size=MAX_BODY_BYTES,
            # A session of the old era without an open stream ends after this time.
            session_idle_timeout=SESSION_IDLE_S,
        )

    def running(self) -> AbstractAsyncContextManager[None]:
        return self._manager.run()

    def revoke(self, jtis: Collection[str]) -> None:
        self._changes.revoke(jtis)

    def begin(self, caller: Caller, body: bytes) -> PendingAnswer | None:
        """Return what answers a request with ``body``, if its method answers once; None if ASGI serves it."""
        if not _is_modern(caller.headers.get(b"mcp-protocol-version")) or caller.size > BYTES_LIKE_A_CALL:
            return None
        try:
            message = loads(body, max_bytes=BYTES_LIKE_A_CALL)
        except StrictJsonError:
            return None
        work = self._work(caller, message) if isinstance(message, dict) else None
        return None if work is None else self._answer_of(work, message["id"])

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._bodies(scope, receive, send)

    def _charge_body(self, caller: Caller) -> None:
        # A call is charged by the gateway; a body larger than a call needs costs more than that to parse.
        if caller.size > BYTES_LIKE_A_CALL:
            self.methods.charge_size(caller)

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        caller: Caller = scope[CALLER_IN_SCOPE]
        scope["user"] = _session_owner(*caller.principal.name)
        if not _opens_session(caller):
            if scope["method"] == "GET":  # only for the event stream of a session
                await self._serve_stream(caller, scope, receive, send)
            else:
                await self._exchange(scope, receive, send)
            return
        try:
            release = self._changes.open_session(caller.principal)
        except StreamLimitError:
            refusal = JSONResponse({"error": "sessions", "message": TOO_MANY_STREAMS}, status_code=429)
            await refusal(scope, receive, send)
            return
        try:
            await self._exchange(scope, receive, send)
        finally:
            release()

    def _work(self, caller: Caller, message: Mapping[str, Any]) -> _Work | None:
        """Return what leads to the one result of a request; None if the SDK serves it."""
        if not _is_valid(caller, message, self.methods):
            return None
        method: str = message["method"]
        if method != CALL_TOOL:
            return self.methods.table[method](caller, message, None)
        call = Call(message, caller.traceparent, caller.correlation_id)
        return None if self.methods.gateway.streams(call) else self.methods.call(caller, call, None)

    async def _serve_stream(self, caller: Caller, scope: Scope, receive: Receive, send: Send) -> None:
        stream = self._logs.watched(caller, send)
        try:
            await self._exchange(scope, receive, stream.send)
        finally:
            stream.close()

    async def _exchange(self, scope: Scope, receive: Receive, send: Send) -> None:
        over = scope[OVER_IN_SCOPE] = asyncio.Event()
        try:
            await self._manager.handle_request(scope, receive, send)
        finally:
            over.set()

    async def _answer_of(self, work: _Work, request_id: str | int) -> HttpAnswer:
        """Return the result of ``work``, or its ``MethodError``, as the answer to the request of that id."""
        status = _OK
        try:
            member = f'"result":{text_of(self._shaped(await work, modern=True))}'
        except MethodError as error:
            status = ERROR_CODE_HTTP_STATUS.get(error.code, _OK)
            document = {"code": error.code, "message": error.message}
            member = (
                f'"error":{encoded(document if error.data is None else {**document, "data": error.data})}'
            )
        return HttpAnswer(status, f'{{"jsonrpc":"2.0","id":{encoded(request_id)},{member}}}'.encode("ascii"))

    def _shaped(self, result: dict[str, Any], *, modern: bool) -> dict[str, Any]:
        """Return ``result`` in the form of its era, as the SDK's models do."""
        if modern:
            meta = {**result.get("_meta", {}), **self._stamp}
            return {**result, "resultType": "complete", "_meta": meta}
        return {name: value for name, value in result.items() if name not in _OF_THE_NEW_ERA}

    async def _answer(self, ctx: Context, call_next: CallNext) -> HandlerResult:
        """Answer a message from the table; the SDK answers what is not in it, or malformed."""
        try:
            return await self._answered(ctx, call_next)
        except MethodError as error:
            raise MCPError(error.code, error.message, error.data) from None

    async def _answered(self, ctx: Context, call_next: CallNext) -> HandlerResult:
        caller, name = caller_of(ctx), ctx.method
        is_ours = name in self.methods.table or name in {CALL_TOOL, *RESOURCE_SUBSCRIPTIONS}
        if is_ours and _takes(name, ctx.protocol_version, ctx.params):
            if name in RESOURCE_SUBSCRIPTIONS:
                self.methods.charge(caller.principal, 1)
                self._changes.subscribe(ctx)
                return {}
            answer = await self._result_of(caller, ctx)
            if answer is None:
                raise MCPError(REQUEST_CANCELLED, "the client has disconnected")
            return with_documents(self._shaped(answer, modern=_is_modern(ctx.protocol_version)))
        if name == "initialize":
            view = self.methods.options_of(caller).selection.view
            instructions = self._server.instructions_for(caller.principal.rights, view)
            self._changes.count_session(ctx)
            # Not at ``initialized``, which is handled after its response: the event stream may be open then.
            self._logs.follow_session(ctx)
            result = await call_next(ctx)
            return result | {"instructions": instructions} if isinstance(result, dict) else result
        result = await call_next(ctx)
        if name == "notifications/initialized":
            self._changes.follow_session(ctx)
        return result

    async def _result_of(self, caller: Caller, ctx: Context) -> dict[str, Any] | None:
        """Return the result of a message of the table; None if its client disconnects while it waits."""
        if ctx.method != CALL_TOOL:
            return await self.methods.table[ctx.method](caller, message_of(ctx), emitter_of(ctx))
        call = call_of(ctx)
        work = self.methods.call(caller, call, emitter_of(ctx))
        if self.methods.gateway.waits(call):
            # In the old era the SDK does not end it with its client, who may be gone.
            return await until_disconnected(work, partial(_disconnected, over_of(ctx)))
        return await work


async def until_disconnected(work: Coroutine[Any, Any, ResultT], receive: Receive) -> ResultT | None:
    """Return the result of ``work``; None, with ``work`` cancelled, if the client disconnects first."""
    async with _ClientWatch(receive):
        return await work
    return None


async def _disconnected(over: asyncio.Event) -> Message:
    await over.wait()
    return {"type": "http.disconnect"}


class _ClientWatch:
    """The context of one request, which ends when its client disconnects.

    Works as ``asyncio.timeout`` does: by cancelling the task that it is in, and by suppressing that
    cancellation and no other.
    """

    __slots__ = ("_cancelling", "_disconnected", "_receive", "_task", "_timer", "_watching")

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._disconnected = False
        self._watching: asyncio.Task[None] | None = None

    async def __aenter__(self) -> None:
        self._task = asyncio.current_task()
        self._cancelling = self._task.cancelling() if self._task is not None else 0
        self._timer = asyncio.get_running_loop().call_later(UNWATCHED_S, self._begin)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        self._timer.cancel()
        if self._watching is not None:
            self._watching.cancel()
        if not self._disconnected or self._task is None:
            return False
        return self._task.uncancel() <= self._cancelling and kind is asyncio.CancelledError

    def _begin(self) -> None:
        self._watching = asyncio.create_task(self._watch())

    async def _watch(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        if self._task is not None:
            self._disconnected = True
            self._task.cancel()


@lru_cache(maxsize=1024)
def _session_owner(issuer: str, tenant: str, sub: str) -> AuthenticatedUser:
    """Return the owner of a session of the old era. It must not contain the token."""
    claims = {"iss": issuer}
    owner = AccessToken(token="", client_id=f"{tenant}/{sub}", scopes=[], subject=sub, claims=claims)
    return AuthenticatedUser(owner)


def _is_modern(protocol_version: str | None) -> bool:
    """Return whether a version is of the new era, which has no sessions."""
    return protocol_version in MODERN_PROTOCOL_VERSIONS


def _opens_session(caller: Caller) -> bool:
    headers = caller.headers
    return b"mcp-session-id" not in headers and not _is_modern(headers.get(b"mcp-protocol-version"))


def _takes(method: str, protocol_version: str, params: Mapping[str, Any] | None) -> bool:
    """Return whether the SDK accepts the parameters of ``method``; the gateway checks those of a call."""
    if method == CALL_TOOL:
        return True
    try:
        validate_client_request(method, protocol_version, params)
    except (KeyError, ValidationError):
        return False
    return True


def _is_valid(caller: Caller, message: Mapping[str, Any], methods: Methods) -> bool:
    """Return whether a request is of the new era, for one of ``methods``, and valid to the SDK.

    ``message`` is its body. By the SDK's own rules, and false in doubt: then the SDK decides.
    """
    method = message.get("method")
    if not isinstance(method, str) or (method != CALL_TOOL and method not in methods.table):
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
    return isinstance(route, InboundModernRoute) and _takes(
        method, route.protocol_version, message.get("params")
    )


@lru_cache(maxsize=256)  # a client sends the same each time
def _accepts_both(accept: str) -> bool:
    headers = [(b"accept", accept.encode("latin-1"))]
    return all(check_accept_headers(Request({"type": "http", "headers": headers})))
