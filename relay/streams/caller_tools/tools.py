"""The tools by which a caller uses sessions, those of this relay and those of others.

The id of a session names the relay that keeps it. A call for another's is forwarded, and judged there as one
of its own: by the principal that this relay has recognised, whose token is looked up among those accepted
there. What opens a session is never forwarded. Must not decide what a caller may do: ``caller_sessions``
does, at the relay that keeps the session.
"""

import asyncio
from collections.abc import Collection, Mapping
from contextlib import suppress
from functools import partial
from hashlib import sha256
from typing import Any

from attrs import define, field

from relay.auth.agent_tokens import AgentName, Authenticator
from relay.calls.relay_tools import RELAY_TOOL_TIMEOUT_S, RelayTool, RelayToolCall
from relay.calls.stream_port import log_message
from relay.fleet.selection import WHOLE_FLEET
from relay.fleet.tools import ToolSchemas
from relay.routing.port import Asker, NoResponderError, Peers
from relay.streams.caller_tools.caller_sessions import CallerSessions, SessionTool, Use, wait_ms_of
from relay.streams.caller_tools.endings import Endings
from relay.streams.caller_tools.event_streams import EventStreams, Push
from relay.streams.caller_tools.registry import Nodes, SessionRegistry
from relay.streams.caller_tools.session import MAX_WAIT_MS, CallerSession
from schemas.errors import Failure, ToolError
from schemas.registry import SchemaRegistry, Validator

CALL, EVENT, LEFT = "session_call", "session_event", "session_left"
"""What relays ask each other: a call, to send an event on the response stream of one, and to note that a
caller has closed a way to its session."""
MAX_LEAVING = 1024
"""How many callers that have left other relays are told of at once; beyond it, a session ends when idle."""

_TAG_DIGITS = 4
_MARGIN_S = 4.0
_EVENT_TIMEOUT_S = 10.0


def tag_of(relay: str) -> str:
    """Return the digits by which the ids of sessions name ``relay``. Two relays may have the same."""
    return sha256(relay.encode("ascii")).hexdigest()[:_TAG_DIGITS]


@define(eq=False, repr=False)
class ForwardedCalls:
    """The calls between this relay and its ``peers``; ``calls`` are those for its own sessions."""

    _peers: Peers
    _calls: CallerSessions
    _sessions: SessionRegistry
    _endings: Endings
    _nodes: Nodes
    _authenticator: Authenticator
    _documents: SchemaRegistry
    _inputs: Mapping[SessionTool, Validator] = field(init=False)
    _pushes: dict[str, Push] = field(init=False, factory=dict)
    _leaving: set[asyncio.Task[None]] = field(init=False, factory=set)

    def __attrs_post_init__(self) -> None:
        self._inputs = {tool: self._documents.load(f"{tool.value}.input@1.0.0") for tool in SessionTool}
        self._peers.answer(LEFT, self._left)
        self._peers.answer(CALL, self._answer)
        self._peers.answer(EVENT, self._push)

    def relays_of(self, session_id: str) -> list[str]:
        """Return the other relays that may keep the session of that id."""
        digits = session_id.rpartition("_")[2]
        return [relay for relay in self._peers.running() if digits.startswith(tag_of(relay))]

    async def run(
        self, relays: Collection[str], tool: SessionTool, use: Use, push: Push | None
    ) -> Mapping[str, Any]:
        """Return the result of a call for a session that one of ``relays`` keeps.

        Raises:
            ToolError: as ``CallerSessions.run`` describes, without text; NODE_OFFLINE if the relay is not
                reached, then nothing was done; DEADLINE_EXCEEDED if it does not answer.
        """
        body = {
            "tool": tool.value,
            "arguments": self._resolved(use),
            "correlation_id": use.correlation_id,
            "stream": push is not None,
            "principal": use.principal.facts(),
        }
        wait_s = wait_ms_of(tool, use.arguments) / 1000
        if push is not None:
            self._pushes[use.correlation_id] = push
        try:
            for relay in relays:
                try:
                    reply = await self._peers.ask(relay, CALL, body, wait_s + _MARGIN_S, use.principal.token)
                except ToolError as error:
                    if error.failure is not Failure.SESSION_UNKNOWN:
                        raise
                else:
                    result: Mapping[str, Any] = reply.get("result", {})
                    return result
        except NoResponderError:
            text = "The relay that keeps the session is not reached; nothing was done."
            raise ToolError(Failure.NODE_OFFLINE, text) from None
        except TimeoutError:
            raise ToolError(Failure.DEADLINE_EXCEEDED) from None
        finally:
            self._pushes.pop(use.correlation_id, None)
        raise ToolError(Failure.SESSION_UNKNOWN)

    def leave(self, session_id: str, caller: AgentName, *, plainly: bool) -> None:
        """Tell the relay that keeps the session, soon, that ``caller`` has closed a way to it here."""
        if len(self._leaving) < MAX_LEAVING:
            telling = asyncio.create_task(self._tell(session_id, caller, plainly=plainly))
            self._leaving.add(telling)
            telling.add_done_callback(self._leaving.discard)

    async def _tell(self, session_id: str, caller: AgentName, *, plainly: bool) -> None:
        who = dict(zip(("issuer", "tenant", "sub"), caller, strict=True))
        body = {"session_id": session_id, **who, "plainly": plainly}
        for relay in self.relays_of(session_id):
            # It may not be reached, and a relay of an older version does not know the question.
            with suppress(NoResponderError, TimeoutError, ToolError):
                await self._peers.ask(relay, LEFT, body, _MARGIN_S)

    async def _left(self, _asker: Asker, body: Mapping[str, Any]) -> Mapping[str, Any]:
        """Note that a caller has closed a way to its session at another relay: a ``PeerHandler``."""
        caller = (body["issuer"], body["tenant"], body["sub"])
        self._endings.leave(self._sessions.of_caller(caller, body["session_id"]), plainly=body["plainly"])
        return {}

    def _resolved(self, use: Use) -> Mapping[str, Any]:
        """Return the arguments with the id of the node that they name: labels and selections stay here."""
        reference = use.arguments.get("node_id")
        if reference is None:
            return use.arguments
        node = self._nodes.find(use.principal.rights, reference, use.selection)
        return {**use.arguments, "node_id": node.node_id}

    async def _answer(self, asker: Asker, body: Mapping[str, Any]) -> Mapping[str, Any]:
        """Run a call that another relay has forwarded: a ``PeerHandler``."""
        tool, arguments = SessionTool(body["tool"]), body["arguments"]
        if "session_id" not in arguments or not self._inputs[tool].is_valid(arguments):
            raise ToolError(Failure.INTERNAL)
        principal = await self._authenticator.of_asker(asker.token, body["principal"])
        correlation_id: str = body["correlation_id"]

        async def push(event: str) -> None:
            sent = {"correlation_id": correlation_id, "event": event}
            try:
                await self._peers.ask(asker.relay, EVENT, sent, _EVENT_TIMEOUT_S)
            except (NoResponderError, TimeoutError):
                raise ToolError(Failure.CALLER_DISCONNECTED) from None

        use = Use(principal, arguments, correlation_id, WHOLE_FLEET)
        return {"result": await self._calls.run(tool, use, push if body["stream"] else None)}

    async def _push(self, _asker: Asker, body: Mapping[str, Any]) -> Mapping[str, Any]:
        """Send an event on the response stream of a call that was forwarded: a ``PeerHandler``."""
        push = self._pushes.get(body["correlation_id"])
        if push is None:
            raise ToolError(Failure.CALLER_DISCONNECTED)
        await push(body["event"])
        return {}


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


@define(eq=False, repr=False)
class SessionTools:
    """The tools over the sessions of all relays: ``calls`` are those for this one's."""

    _calls: CallerSessions
    _registry: SessionRegistry
    _streams: EventStreams
    _endings: Endings
    _forwarded: ForwardedCalls | None

    def tools(self, registry: SchemaRegistry) -> tuple[RelayTool, ...]:
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
        principal = call.caller.principal
        session_id: str = call.arguments.get("session_id", "")
        use = Use(principal, call.arguments, call.correlation_id, call.selection)
        push, stream_id = _push_of(call), call.caller.headers.get(_STREAM_ID)
        forwarded, relays = self._forwarded, list[str]()
        if forwarded is not None and session_id not in self._registry:
            relays = forwarded.relays_of(session_id)
        used: list[CallerSession] = []

        def found(session: CallerSession) -> None:
            used.append(session)
            # Its events are sent on the event stream of the MCP session too.
            if stream_id is not None:
                self._streams.follow(stream_id, session, principal)

        try:
            if forwarded is None or not relays:
                return await self._calls.run(tool, use, push, found)
            result = await forwarded.run(relays, tool, use, push)
        except asyncio.CancelledError:
            if not call.is_stopped():
                for session in used:
                    self._endings.leave(session, plainly=push is not None)
                if forwarded is not None and relays:
                    forwarded.leave(session_id, principal.name, plainly=push is not None)
            raise
        if stream_id is not None:
            ended = result.get("ended", False)
            self._streams.follow_elsewhere(stream_id, session_id, principal.name, ended=ended)
        return result


def _push_of(call: RelayToolCall) -> Push | None:
    """Return what sends events on the response stream of ``call``, if the caller wants them there."""
    emit = call.log_emit
    if emit is None or not call.arguments.get("stream"):
        return None

    async def push(event: str) -> None:
        await emit(*log_message(event))

    return push
