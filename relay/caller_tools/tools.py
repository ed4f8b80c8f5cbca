"""The tools by which a caller uses sessions.

Arguments have passed their documents, and the call its checks, when a method here is called. Must not decide:
``caller_sessions`` does.
"""

from collections.abc import Mapping
from typing import Any

from pydantic_core import from_json

from relay.auth.permissions import Rights
from relay.caller_tools.caller_sessions import CallerSessions, Use
from relay.caller_tools.event_streams import EventStreams
from relay.caller_tools.limits import MAX_WAIT_MS
from relay.caller_tools.polls import Polls
from relay.caller_tools.session import CallerSession
from relay.calls.relay_tools import RelayTool, RelayToolCall
from relay.fleet.tool_schemas import ToolSchemas
from schemas.registry import SchemaRegistry

LOGGER = "oubliette.session"
LEVEL = "info"

_TIMEOUT_S = MAX_WAIT_MS / 1000 + 5
_POLL_MS = 20_000
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


class SessionTools:
    """The tools over the sessions of one relay."""

    def __init__(self, sessions: CallerSessions, polls: Polls, streams: EventStreams) -> None:
        self._sessions = sessions
        self._polls = polls
        self._streams = streams

    def tools(self, registry: SchemaRegistry) -> tuple[RelayTool, ...]:
        """Return the tools, to be registered."""
        return (
            RelayTool(
                canonical="session_message",
                title="Talk to a node's local agent",
                description=_MESSAGE,
                schemas=_schemas(registry, "session_message"),
                schema_ref="session_message.input@1.0.0",
                safety_class="reversible",
                idempotent=False,
                visible=_may_message,
                answer=self._message,
                timeout_s=_TIMEOUT_S,
                logs=True,
                waits=True,
                verbatim=True,
            ),
            RelayTool(
                canonical="session_events",
                title="Read a session's events",
                description=_EVENTS,
                schemas=_schemas(registry, "session_events"),
                schema_ref="session_events.input@1.0.0",
                safety_class="read_only",
                idempotent=True,
                visible=_may_message,
                answer=self._events,
                timeout_s=_TIMEOUT_S,
                logs=True,
                waits=True,
                verbatim=True,
            ),
            RelayTool(
                canonical="caller_tool_response",
                title="Answer a local agent's request",
                description=_RESPONSE,
                schemas=_schemas(registry, "caller_tool_response"),
                schema_ref="caller_tool_response.input@1.0.0",
                safety_class="reversible",
                idempotent=False,
                visible=_may_message,
                answer=self._respond,
            ),
        )

    async def _message(self, call: RelayToolCall) -> Mapping[str, Any]:
        session = self._sessions.message(_use(call))
        self._follow(session, call)
        await self._wait(session, call, call.arguments.get("wait_ms", 0))
        read = _read(session, call.arguments.get("after", 0))
        return {"session_id": session.session_id, "node_id": session.facts.node_id, **read}

    async def _events(self, call: RelayToolCall) -> Mapping[str, Any]:
        session = self._sessions.session_of(_use(call))
        self._follow(session, call)
        await self._wait(session, call, call.arguments.get("wait_ms", _POLL_MS))
        return {"session_id": session.session_id, **_read(session, call.arguments.get("after", 0))}

    async def _respond(self, call: RelayToolCall) -> Mapping[str, Any]:
        session = self._sessions.respond(_use(call))
        self._follow(session, call)
        return {
            "session_id": session.session_id,
            "request_id": call.arguments["request_id"],
            "accepted": True,
        }

    def _follow(self, session: CallerSession, call: RelayToolCall) -> None:
        """Send the events also on the event stream of the MCP session in which the call was made, if any."""
        stream_id = call.caller.headers.get(_STREAM_ID)
        if stream_id is not None:
            self._streams.follow(stream_id, session, call.caller.principal)

    async def _wait(self, session: CallerSession, call: RelayToolCall, wait_ms: int) -> None:
        if wait_ms == 0 or session.has_ended:
            return
        principal, after, emit = call.caller.principal, call.arguments.get("after", 0), call.log_emit
        if emit is None or not call.arguments.get("stream"):
            await self._polls.wait(session, principal, after, wait_ms / 1000)
            return

        async def push(event: str) -> None:
            await emit(*log_message(event))

        await self._polls.stream(session, principal, after, wait_ms / 1000, push)


def _use(call: RelayToolCall) -> Use:
    return Use(call.caller.principal, call.arguments, call.correlation_id, call.selection)


def _read(session: CallerSession, after: int) -> dict[str, Any]:
    events = session.read(after)
    following = events[-1].cursor if events else session.events.newest
    return {
        "events": [from_json(event.text) for event in events],
        "next": following,
        "more": session.has_events(following),
        "missed": session.events.has_missed(after),
        "ended": session.has_ended,
    }


def _schemas(registry: SchemaRegistry, name: str) -> ToolSchemas:
    return ToolSchemas.of(registry, f"{name}.input@1.0.0", f"{name}.output@1.0.0")


def _may_message(rights: Rights) -> bool:
    return rights.may_message
