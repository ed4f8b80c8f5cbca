"""``/mcp`` and the paths below it: Streamable HTTP in both protocol eras, over one table of methods.

A request of the new era whose method is in the table is answered from there (``direct``). Streams, the old
era and every request that the SDK would reject go to the SDK, whose middleware reads the same table: the
SDK's typed models would drop ``x-safety-class``. Must not decide anything: the gateway decides who may call
what, and the fleet what is listed.
"""

from collections.abc import Collection, Mapping
from contextlib import AbstractAsyncContextManager
from typing import Any

from mcp.server.context import CallNext, HandlerResult
from mcp.server.streamable_http import REQUEST_CANCELLED
from mcp.server.streamable_http_manager import StreamableHTTPSessionManager
from mcp.shared.exceptions import MCPError
from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from relay.auth.agent_tokens import CALLER_IN_SCOPE, Caller
from relay.http.body_parser import MAX_BODY_BYTES, MESSAGE_IN_SCOPE, BodyParser
from relay.http.direct_http import PendingAnswer
from relay.mcp_api import direct
from relay.mcp_api.change_streams import RESOURCE_SUBSCRIPTIONS, TOO_MANY_STREAMS, ChangeStreams
from relay.mcp_api.fragments import with_documents
from relay.mcp_api.log_streams import LogStreams, is_for_stream
from relay.mcp_api.methods import BYTES_LIKE_A_CALL, MethodError, Methods
from relay.mcp_api.open_streams import StreamLimitError
from relay.mcp_api.sdk import (
    EXCHANGE_IN_SCOPE,
    Context,
    Eras,
    Exchange,
    SdkServer,
    answers_once,
    caller_of,
    emitter_of,
    exchange_of,
    is_modern,
    message_of,
    opens_session,
    session_owner,
    takes,
)
from schemas.strict_json import StrictJsonError, loads

SESSION_IDLE_S = 300


class McpEndpoint:
    """The MCP side of one relay: an ASGI application for the paths of MCP."""

    def __init__(self, server: SdkServer, methods: Methods, changes: ChangeStreams, logs: LogStreams) -> None:
        self.methods = methods
        self._server = server
        self._changes = changes
        self._logs = logs
        self._eras = Eras(server)
        self._bodies = BodyParser(self._serve, self._charge_body)
        server.serve(self._answer, changes.listen, logs.set_level)
        self._manager = StreamableHTTPSessionManager(
            app=server,
            # The request guard checks Host and Origin for every route.
            security_settings=None,
            max_request_body_size=MAX_BODY_BYTES,
            # A session of the old era without an open stream ends after this time.
            session_idle_timeout=SESSION_IDLE_S,
        )

    def running(self) -> AbstractAsyncContextManager[None]:
        """Return the context in which requests can be served."""
        return self._manager.run()

    def revoke(self, jtis: Collection[str]) -> None:
        """End the streams that were opened with one of these tokens."""
        self._changes.revoke(jtis)

    def begin(self, caller: Caller, body: bytes) -> PendingAnswer | None:
        """Return what answers a request with ``body``, if its method answers once; None if ASGI serves it."""
        if not is_modern(caller.headers.get(b"mcp-protocol-version")) or caller.size > BYTES_LIKE_A_CALL:
            return None
        try:
            message = loads(body, max_bytes=BYTES_LIKE_A_CALL)
        except StrictJsonError:
            return None
        if not isinstance(message, dict) or not self._answers_once(caller, message):
            return None
        return direct.answer_of(self._answered(caller, message), message["id"])

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one HTTP request, whose caller the guard has put into the scope."""
        await self._bodies(scope, receive, send)

    def _charge_body(self, caller: Caller) -> None:
        # A call is charged by the gateway; a body larger than a call needs costs more than that to parse.
        if caller.size > BYTES_LIKE_A_CALL:
            self.methods.charge_size(caller)

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        caller: Caller = scope[CALLER_IN_SCOPE]
        message = scope.get(MESSAGE_IN_SCOPE)
        if isinstance(message, dict) and self._answers_once(caller, message):
            await direct.answer(self._answered(caller, message), message["id"], receive, send)
            return
        scope["user"] = session_owner(*caller.principal.name)
        if not opens_session(caller):
            if is_for_stream(scope):
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

    def _answers_once(self, caller: Caller, message: Mapping[str, Any]) -> bool:
        return answers_once(caller, message, self.methods.table) and not self.methods.streams(message)

    async def _serve_stream(self, caller: Caller, scope: Scope, receive: Receive, send: Send) -> None:
        stream = self._logs.watched(caller, send)
        try:
            await self._exchange(scope, receive, stream.send)
        finally:
            stream.close()

    async def _exchange(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let the SDK serve a request."""
        exchange = scope[EXCHANGE_IN_SCOPE] = Exchange()
        try:
            await self._manager.handle_request(scope, receive, send)
        finally:
            exchange.end()

    async def _answered(self, caller: Caller, message: Mapping[str, Any]) -> dict[str, Any]:
        result = await self.methods.table[message["method"]](caller, message, None)
        return self._eras.shaped(result, modern=True)

    def _instructions_for(self, caller: Caller) -> str:
        try:
            view = self.methods.options_of(caller).selection.view
        except MethodError as error:
            raise MCPError(error.code, error.message, error.data) from None
        return self._server.instructions_for(caller.principal.rights, view)

    def _charge(self, caller: Caller) -> None:
        try:
            self.methods.charge(caller.principal, 1)
        except MethodError as error:
            raise MCPError(error.code, error.message, error.data) from None

    async def _answer(self, ctx: Context, call_next: CallNext) -> HandlerResult:
        """Answer a message from the table; the SDK answers what is not in it, or malformed."""
        method = self.methods.table.get(ctx.method)
        if method is not None and takes(ctx.method, ctx.protocol_version, ctx.params):
            message = message_of(ctx)
            answering = method(caller_of(ctx), message, emitter_of(ctx))
            answer: dict[str, Any] | None
            try:
                if self.methods.waits(message):
                    # In the old era the SDK does not end it with its client, who may be gone.
                    answer = await direct.until_disconnected(answering, exchange_of(ctx).disconnected)
                else:
                    answer = await answering
            except MethodError as error:
                raise MCPError(error.code, error.message, error.data) from None
            if answer is None:
                raise MCPError(REQUEST_CANCELLED, "the client has disconnected")
            return with_documents(self._eras.shaped(answer, modern=is_modern(ctx.protocol_version)))
        if ctx.method in RESOURCE_SUBSCRIPTIONS and takes(ctx.method, ctx.protocol_version, ctx.params):
            self._charge(caller_of(ctx))
            self._changes.subscribe(ctx)
            return {}
        if ctx.method == "initialize":
            instructions = self._instructions_for(caller_of(ctx))
            self._changes.count_session(ctx)
            # Not at ``initialized``, which is handled after its response: the event stream may be open then.
            self._logs.follow_session(ctx)
            result = await call_next(ctx)
            return result | {"instructions": instructions} if isinstance(result, dict) else result
        result = await call_next(ctx)
        if ctx.method == "notifications/initialized":
            self._changes.follow_session(ctx)
        return result
