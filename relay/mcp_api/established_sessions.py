"""The sessions of the old era in which plain requests are answered without the SDK (docs/decisions/0094).

The SDK makes streams, tasks and models of each request, which take five times as long as a call. Its session
stays what counts: its owner, its end, and how long it lasts without a request. A call goes on when its client
disconnects, as the SDK's do, and ends by ``notifications/cancelled`` or with its session. Must not open a
session, nor decide what is plain: ``endpoint`` does.
"""

import asyncio
import math
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from attrs import define, field
from mcp.server.connection import Connection
from mcp.server.streamable_http import MCP_SESSION_ID_HEADER, REQUEST_CANCELLED, StreamableHTTPServerTransport
from mcp_types.version import HANDSHAKE_PROTOCOL_VERSIONS

from relay.auth.agent_tokens import Caller, Principal
from relay.http.http_protocol import HttpAnswer, PendingAnswer
from relay.mcp_api.sdk import Context, caller_of, connection_of
from relay.observability.ascii_json import encoded

_SET_EVERY_S = 30.0
"""To set the end of a session takes a twentieth of a call, so it is not set at each."""
_SESSION_ID = MCP_SESSION_ID_HEADER.encode("ascii")
_VERSION = b"mcp-protocol-version"
_ACCEPTED = HttpAnswer(202, b"")


@define(eq=False, repr=False)
class EstablishedSession:
    """One session, with the SDK's connection and the transport that ends it.

    Attributes:
        principal: its owner, with the token that was used last.
        calls: those in flight here, by the ids of their requests.
    """

    connection: Connection
    _transport: StreamableHTTPServerTransport
    principal: Principal
    calls: dict[int | str, asyncio.Task[Any]] = field(init=False, factory=dict)

    @property
    def version(self) -> str:
        return self.connection.protocol_version

    @property
    def is_open(self) -> bool:
        """Whether it has begun, and the SDK has not begun to end it."""
        idle = self._transport.idle_scope
        ends = self._transport.is_terminated or idle is None or idle.cancel_called
        return self.connection.initialize_accepted and not ends

    async def answer(self, work: Coroutine[Any, Any, HttpAnswer]) -> HttpAnswer:
        """Return the answer of a request; meanwhile the session does not end for want of one."""
        # As the SDK's transport counts its own requests, which has no public way to do it.
        transport: Any = self._transport
        self._prolong()
        transport._requests_in_flight += 1  # noqa: SLF001
        try:
            return await work
        finally:
            transport._requests_in_flight -= 1  # noqa: SLF001
            self._prolong()

    def _prolong(self) -> None:
        """Have the session last for the idle time from now on at least, and longer than a request takes."""
        transport: Any = self._transport
        scope, until = transport.idle_scope, asyncio.get_running_loop().time() + transport._idle_timeout  # noqa: SLF001
        # The SDK leaves it without an end as long as it counts requests, of which the last sets one.
        is_left_to_us = scope.deadline == math.inf and not transport._requests_in_flight  # noqa: SLF001
        if scope.deadline < until or is_left_to_us:
            scope.deadline = until + _SET_EVERY_S

    async def answer_call(self, request_id: int | str, work: Coroutine[Any, Any, HttpAnswer]) -> HttpAnswer:
        """Return the answer of a call, in a task of its own, which ``end_call`` ends."""
        task: Any = asyncio.current_task()
        self.calls[request_id] = task
        try:
            return await self.answer(work)
        except asyncio.CancelledError:
            if self.calls.get(request_id) is task or task.uncancel():
                raise  # the server ends it
        finally:
            if self.calls.get(request_id) is task:
                del self.calls[request_id]
        error = encoded({"code": REQUEST_CANCELLED, "message": "Request cancelled"})
        text = f'{{"jsonrpc":"2.0","id":{encoded(request_id)},"error":{error}}}'
        return HttpAnswer(200, text.encode("ascii"))

    def cancel(self, params: object) -> PendingAnswer | None:
        """Cancel the call that a notification names; return the answer to that, or None if it is not here."""
        request_id: Any = params.get("requestId") if isinstance(params, dict) else None
        if type(request_id) not in {int, str} or request_id not in self.calls:
            return None
        self.end_call(request_id)
        return PendingAnswer(_accepted())

    def end_call(self, request_id: int | str) -> None:
        self.calls.pop(request_id).cancel()


async def _accepted() -> HttpAnswer:
    return _ACCEPTED


@define(eq=False, repr=False)
class EstablishedSessions:
    """The sessions of all agents, by id; ``transports`` are the SDK's.

    ``renewed`` is called when the owner of one uses another token in it, or one with other rights.
    """

    _transports: Mapping[str, StreamableHTTPServerTransport]
    _renewed: Callable[[Connection, Principal], None]
    _sessions: dict[str, EstablishedSession] = field(init=False, factory=dict)

    def begin(self, context: Context) -> None:
        """Note a session whose client has sent ``initialize``."""
        connection = connection_of(context)
        transport = self._transports.get(connection.session_id)
        if transport is None or connection.session_id in self._sessions:
            return
        session = EstablishedSession(connection, transport, caller_of(context).principal)
        self._sessions[connection.session_id] = session
        connection.exit_stack.callback(self._end, connection.session_id)

    def of(self, caller: Caller) -> EstablishedSession | None:
        """Return the open session that a request of ``caller`` is in, if it is the caller's own."""
        session = self._sessions.get(caller.headers.get(_SESSION_ID, ""))
        version = caller.headers.get(_VERSION)
        principal = caller.principal
        if session is None or session.principal.name != principal.name or not session.is_open:
            return None
        if session.principal is not principal and session.principal != principal:
            session.principal = principal
            self._renewed(session.connection, principal)
        return session if version is None or version in HANDSHAKE_PROTOCOL_VERSIONS else None

    def _end(self, session_id: str) -> None:
        session = self._sessions.pop(session_id)
        for request_id in list(session.calls):
            session.end_call(request_id)
