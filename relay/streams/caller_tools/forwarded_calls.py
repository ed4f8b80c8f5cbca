"""Calls of callers for sessions that another relay of the fleet keeps: forwarded to it, and answered there.

The id of a session names the relay that keeps it. That relay judges the call as one of its own: by the
principal that the other relay has recognised, whose token it looks up among those it accepts itself. Must not
forward what opens a session: that is kept where it was opened.
"""

import asyncio
from collections.abc import Collection, Mapping
from contextlib import suppress
from hashlib import sha256
from typing import Any

from attrs import define, field

from relay.auth.agent_tokens import AgentName, Authenticator
from relay.fleet.selection import WHOLE_FLEET
from relay.routing.port import NoResponderError, Peers
from relay.streams.caller_tools.caller_sessions import CallerSessions, SessionTool, Use, wait_ms_of
from relay.streams.caller_tools.endings import Endings
from relay.streams.caller_tools.event_streams import Push
from relay.streams.caller_tools.registry import Nodes, SessionRegistry
from schemas.errors import Failure, ToolError
from schemas.registry import SchemaRegistry, Validator
from schemas.tokens import TokenError

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

    def relays_of(self, session_id: str) -> Collection[str]:
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
                    reply = await self._peers.ask(relay, CALL, body, wait_s + _MARGIN_S)
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

    async def _left(self, _relay: str, body: Mapping[str, Any]) -> Mapping[str, Any]:
        """Note that a caller has closed a way to its session at another relay: a ``PeerHandler``."""
        caller = (body["issuer"], body["tenant"], body["sub"])
        self._endings.leave(self._sessions.of_caller(caller, body["session_id"]), plainly=body["plainly"])
        return {}

    def _resolved(self, use: Use) -> Mapping[str, Any]:
        """Return the arguments with the id of the node that they name: labels and selections stay here."""
        reference = use.arguments.get("node_id")
        if reference is None:
            return use.arguments
        node = self._nodes.find(use.principal.tenant, reference, use.selection)
        return {**use.arguments, "node_id": node.node_id}

    async def _answer(self, relay: str, body: Mapping[str, Any]) -> Mapping[str, Any]:
        """Run a call that another relay has forwarded: a ``PeerHandler``."""
        tool, arguments = SessionTool(body["tool"]), body["arguments"]
        if "session_id" not in arguments or not self._inputs[tool].is_valid(arguments):
            raise ToolError(Failure.INTERNAL)
        try:
            principal = self._authenticator.forwarded(**body["principal"])
        except TokenError:
            raise ToolError(Failure.SAFETY_DENIED) from None
        correlation_id: str = body["correlation_id"]

        async def push(event: str) -> None:
            sent = {"correlation_id": correlation_id, "event": event}
            try:
                await self._peers.ask(relay, EVENT, sent, _EVENT_TIMEOUT_S)
            except (NoResponderError, TimeoutError):
                raise ToolError(Failure.CALLER_DISCONNECTED) from None

        use = Use(principal, arguments, correlation_id, WHOLE_FLEET)
        return {"result": await self._calls.run(tool, use, push if body["stream"] else None)}

    async def _push(self, _relay: str, body: Mapping[str, Any]) -> Mapping[str, Any]:
        """Send an event on the response stream of a call that was forwarded: a ``PeerHandler``."""
        push = self._pushes.get(body["correlation_id"])
        if push is None:
            raise ToolError(Failure.CALLER_DISCONNECTED)
        await push(body["event"])
        return {}
