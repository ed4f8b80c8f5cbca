"""Connects the event streams of the old era with the events of callers' sessions, as log messages.

An MCP session of the old era has one event stream, which its client opens with GET and may close and open
again. ``logging/setLevel`` decides whether it gets them. Must not choose events: ``caller_tools`` does.
"""

from http import HTTPStatus

import mcp_types as types
from attrs import define, field
from starlette.types import Message, Send

from relay.auth.agent_tokens import Caller, Principal
from relay.calls.envelope import LEVELS_WITH_INFO
from relay.mcp_api.sdk import Context, connection_of
from relay.streams.caller_tools.event_streams import EventStreams
from relay.streams.caller_tools.tools import LEVEL, log_message

_SESSION_ID = b"mcp-session-id"
_LEVEL_IN_STATE = "log level"


@define(eq=False, repr=False)
class LogStreams:
    """The event streams of all MCP sessions of the old era."""

    _streams: EventStreams

    def follow_session(self, context: Context) -> None:
        connection = connection_of(context)
        stream_id = connection.session_id
        if stream_id is None or _LEVEL_IN_STATE in connection.state:
            return
        connection.state[_LEVEL_IN_STATE] = LEVEL

        async def send(event: str) -> bool:
            if connection.state[_LEVEL_IN_STATE] not in LEVELS_WITH_INFO:
                return False
            await connection.notify(*log_message(event))
            return True

        self._streams.attach(stream_id, send)
        connection.exit_stack.callback(self._streams.detach, stream_id)

    async def set_level(self, context: Context, params: types.SetLevelRequestParams) -> types.EmptyResult:
        connection_of(context).state[_LEVEL_IN_STATE] = params.level
        return types.EmptyResult()

    def watched(self, caller: Caller, send: Send) -> "WatchedStream":
        """Return the context of a GET request, which opens the event stream if the SDK accepts it."""
        return WatchedStream(self._streams, caller.headers.get(_SESSION_ID), caller.principal, send)


@define(eq=False, repr=False)
class WatchedStream:
    """One GET request for an event stream. ``send`` is what the SDK sends its response with."""

    _streams: EventStreams
    _stream_id: str | None
    _principal: Principal
    _send: Send
    _is_open: bool = field(init=False, default=False)

    async def send(self, message: Message) -> None:
        """Pass on a part of the response; the stream is open once its head is sent."""
        await self._send(message)
        is_head = message["type"] == "http.response.start"
        if is_head and message["status"] == HTTPStatus.OK and self._stream_id is not None:
            # By now the SDK has started the task that takes in what is to be sent on the stream.
            self._is_open = True
            self._streams.opened(self._stream_id, self._principal)

    def close(self) -> None:
        if self._is_open and self._stream_id is not None:
            self._streams.closed(self._stream_id)
