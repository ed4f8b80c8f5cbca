"""The tools by which a caller uses sessions, those of this relay and those of others.

Must not decide what a caller may do: ``caller_sessions`` does, at the relay that keeps the session.
"""

import asyncio
from collections.abc import Collection, Mapping
from functools import partial
from typing import Any

from attrs import define
from pydantic_core import from_json

from relay.calls.relay_tools import RELAY_TOOL_TIMEOUT_S, RelayTool, RelayToolCall
from relay.fleet.tools import ToolSchemas
from relay.streams.caller_tools.caller_sessions import CallerSessions, SessionTool, Use
from relay.streams.caller_tools.endings import Endings
from relay.streams.caller_tools.event_streams import EventStreams, Push
from relay.streams.caller_tools.forwarded_calls import ForwardedCalls
from relay.streams.caller_tools.limits import MAX_WAIT_MS
from relay.streams.caller_tools.registry import SessionRegistry
from relay.streams.caller_tools.session import CallerSession
from schemas.registry import SchemaRegistry

LOGGER = "oubliette.session"
LEVEL = "info"

_TIMEOUT_S = MAX_WAIT_MS / 1000 + 5
_STREAM_ID = b"mcp-session-id"

_MESSAGE = (
    "Open a session with a node's local agent, or use an open one: send a message, lend tools, end it. "
    "Without session_id a new session is opened, for which node_id and context.caller_id are needed. "
    "Then read session_events."
)
_EVENTS = (
    "Read what happened in a session: messages of the local agent, and its requests for the tools that "
    "you lend. Pass next as after in the following call. Answer each caller_tool_request once, with "
    "caller_tool_response."
)
_RESPONSE = (
    "Answer a caller_tool_request event with the result of the tool, or with an error. A request_id is "
    "good once, and within the timeout of the relay."
)


def log_message(event: str) -> tuple[str, dict[str, Any]]:
    """Return the notification that carries an event, which is JSON: its method and its parameters."""
    return "notifications/message", {"level": LEVEL, "logger": LOGGER, "data": from_json(event)}


@define(eq=False, repr=False)
class SessionTools:
    """The tools over the sessions of all relays: ``calls`` are those for this one's."""

    _calls: CallerSessions
    _registry: SessionRegistry
    _streams: EventStreams
    _endings: Endings
    _forwarded: ForwardedCalls | None

    def tools(self, registry: SchemaRegistry) -> tuple[RelayTool, ...]:
        """Return the tools, to be registered."""

        def row(name: SessionTool, title: str, description: str, **members: Any) -> RelayTool:
            document = f"{name}.input@1.0.0"
            waits = name is not SessionTool.RESPONSE
            return RelayTool(
                canonical=name.value,
                title=title,
                description=description,
                schemas=ToolSchemas.of(registry, document, f"{name}.output@{'1.1.0' if waits else '1.0.0'}"),
                schema_ref=document,
                visible=lambda rights: rights.may_message,
                answer=partial(self._run, name),
                timeout_s=_TIMEOUT_S if waits else RELAY_TOOL_TIMEOUT_S,
                logs=waits,
                waits=waits,
                verbatim=waits,
                **members,
            )

        acts = {"safety_class": "reversible", "idempotent": False}
        reads = {"safety_class": "read_only", "idempotent": True}
        return (
            row(SessionTool.MESSAGE, "Talk to a node's local agent", _MESSAGE, **acts),
            row(SessionTool.EVENTS, "Read a session's events", _EVENTS, **reads),
            row(SessionTool.RESPONSE, "Answer a local agent's request", _RESPONSE, **acts),
        )

    async def _run(self, tool: SessionTool, call: RelayToolCall) -> Mapping[str, Any]:
        use = Use(call.caller.principal, call.arguments, call.correlation_id, call.selection)
        session_id = call.arguments.get("session_id")
        if self._forwarded is not None and session_id is not None and session_id not in self._registry:
            relays = self._forwarded.relays_of(session_id)
            if relays:
                return await self._elsewhere(self._forwarded, relays, tool, use, call)
        push = _push_of(call)
        used: list[CallerSession] = []

        def found(session: CallerSession) -> None:
            used.append(session)
            self._follow(session, call)

        try:
            return await self._calls.run(tool, use, push, found)
        except asyncio.CancelledError:
            if not call.is_stopped():
                for session in used:
                    self._endings.leave(session, plainly=push is not None)
            raise

    async def _elsewhere(
        self,
        forwarded: ForwardedCalls,
        relays: Collection[str],
        tool: SessionTool,
        use: Use,
        call: RelayToolCall,
    ) -> Mapping[str, Any]:
        """Return the result of a call for a session that one of ``relays`` keeps."""
        push, session_id, caller = _push_of(call), call.arguments["session_id"], use.principal.name
        try:
            result = await forwarded.run(relays, tool, use, push)
        except asyncio.CancelledError:
            if not call.is_stopped():
                forwarded.leave(session_id, caller, plainly=push is not None)
            raise
        stream_id = call.caller.headers.get(_STREAM_ID)
        if stream_id is not None:
            self._streams.follow_elsewhere(stream_id, session_id, caller, ended=result.get("ended", False))
        return result

    def _follow(self, session: CallerSession, call: RelayToolCall) -> None:
        """Send the events also on the event stream of the MCP session in which the call was made, if any."""
        stream_id = call.caller.headers.get(_STREAM_ID)
        if stream_id is not None:
            self._streams.follow(stream_id, session, call.caller.principal)


def _push_of(call: RelayToolCall) -> Push | None:
    """Return what sends events on the response stream of ``call``, if the caller wants them there."""
    emit = call.log_emit
    if emit is None or not call.arguments.get("stream"):
        return None

    async def push(event: str) -> None:
        await emit(*log_message(event))

    return push
