"""Callers' sessions between a gateway that a test calls, and a node whose frames a test sends and reads."""

import asyncio
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any, Final
from uuid import UUID

from relay.auth.agent_tokens import Caller
from relay.calls.envelope import Call
from relay.calls.executor import CallRequest
from relay.calls.relay_tools import Emit
from relay.http.websocket_protocol import FrameMeter
from relay.state.kinds import watched_names
from relay.state.watcher import SHARED
from schemas.frames import Frame, OneWayType
from tests.fakes.callers import principal_of
from tests.fakes.hub import Hub
from tests.fakes.routers import ScriptedRouter
from tests.fakes.signer import SimulatedNode

SCOPE: Final = "sessions:message"
BOUND_S: Final = 30
TOOLS: Final[Sequence[Mapping[str, Any]]] = (
    {
        "name": "send_response",
        "description": "Send a message via Signal",
        "inputSchema": {"type": "object", "properties": {"message": {"type": "string"}}},
    },
    {"name": "get_memory", "description": "Retrieve stored memories for context"},
)


def request_id(number: int = 0) -> str:
    """Return a UUIDv4."""
    return str(UUID(int=number, version=4))


def answer_to(session_id: str, number: int = 0, **answer: Any) -> dict[str, Any]:
    """Return the arguments of ``caller_tool_response`` for the request of that number."""
    return {"session_id": session_id, "request_id": request_id(number), **answer}


class ResponseStream:
    """The response stream of a call, on which events are sent."""

    def __init__(self) -> None:
        self.sent: asyncio.Queue[Mapping[str, Any]] = asyncio.Queue()

    async def emit(self, method: str, params: Mapping[str, Any]) -> None:
        assert method == "notifications/message"
        assert (params["level"], params["logger"]) == ("info", "oubliette.session")
        self.sent.put_nowait(params["data"])

    async def next(self) -> Mapping[str, Any]:
        return await asyncio.wait_for(self.sent.get(), BOUND_S)


class _Connection:
    """A connection of a node, which notes what is sent."""

    def __init__(self, hub: Hub, sent: "asyncio.Queue[tuple[str, Mapping[str, Any]]]") -> None:
        self.meter = FrameMeter(hub.seconds)
        self.meter.admit()
        self.is_open = True
        self._sent = sent

    def encoded(self, type_: str, payload: Mapping[str, Any]) -> str:
        self._sent.put_nowait((type_, payload))
        return ""

    async def send_text(self, _text: str) -> None:
        return


class CallerStage:
    """One node, which is connected, and callers of its tenant.

    Attributes:
        token: of the caller that opens sessions unless a test names another.
    """

    def __init__(self, hub: Hub, session_id: str | None = "S1", node: SimulatedNode | None = None) -> None:
        self.hub = hub
        self.node = node or hub.ca.issue()
        self.gateway = hub.gateway(ScriptedRouter(), monotonic=hub.seconds)
        self.token = hub.token([SCOPE])
        self._sent: asyncio.Queue[tuple[str, Mapping[str, Any]]] = asyncio.Queue()
        self._session: Any = None
        if session_id is None:
            hub.announce(self.node)  # another relay has its connection
        else:
            hub.connect(self.node)
            self.link(session_id)

    def link(self, session_id: str) -> None:
        """Connect the node in the session ``session_id``: a new one, or one that it resumes."""
        identity = self.node.identity()
        self._session = SimpleNamespace(identity=identity, session_id=session_id)
        connection: Any = _Connection(self.hub, self._sent)
        self.hub.one_way.connected(self._session, connection)

    def lose(self) -> None:
        """Lose the node's connection."""
        self.hub.one_way.lost(self._session)

    def later(self, seconds: float) -> None:
        """Let time pass, and end what is over."""
        self.hub.seconds.now += seconds
        for source in (*watched_names(), SHARED):
            self.hub.freshness.read(source)
        self.hub.expiry.sweep_requests()
        self.hub.expiry.sweep_sessions()

    def send(self, type_: OneWayType, session_id: str, **payload: Any) -> None:
        """Let the node send a frame."""
        self.receive(type_, {"session_id": session_id, **payload})

    def receive(self, type_: OneWayType, payload: Mapping[str, Any]) -> None:
        """Let the node send a frame with this payload."""
        self.hub.one_way.received(self._session, Frame(type_.value, "0" * 26, payload))

    def request(self, session_id: str, number: int = 0, tool: str = "get_memory", **arguments: Any) -> None:
        """Let the node's local agent call ``tool``."""
        members = {"request_id": request_id(number), "tool": tool, "arguments": arguments}
        self.send(OneWayType.CALLER_TOOL, session_id, **members)

    def sent(self) -> list[tuple[str, Mapping[str, Any]]]:
        """Return what was sent to the node since the last time."""
        return [self._sent.get_nowait() for _ in range(self._sent.qsize())]

    async def next_sent(self) -> tuple[str, Mapping[str, Any]]:
        """Return the next frame to the node, and wait for it."""
        return await asyncio.wait_for(self._sent.get(), BOUND_S)

    def results(self) -> dict[str, Any]:
        """Return the answers among it: the result, or the code of the error, by request."""
        return {
            payload["request_id"]: payload["error"]["code"] if "error" in payload else payload["result"]
            for type_, payload in self.sent()
            if type_ == "caller_tool_result"
        }

    async def call(
        self,
        name: str,
        token: str | None = None,
        *,
        emit: Emit | None = None,
        meta: Mapping[str, Any] | None = None,
        stream_id: str | None = None,
        **arguments: Any,
    ) -> tuple[Mapping[str, Any] | None, Mapping[str, Any] | None]:
        """Call a tool; return its result, or its error."""
        params: dict[str, Any] = {"name": name, "arguments": arguments, "_meta": dict(meta or {})}
        message = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": params}
        headers = {} if stream_id is None else {b"mcp-session-id": stream_id}
        caller = Caller(principal_of(token or self.token), "http", headers)
        answer = await asyncio.wait_for(self.gateway.call(CallRequest(caller, Call(message), emit)), BOUND_S)
        return answer.result, answer.error

    async def result(self, name: str, token: str | None = None, **arguments: Any) -> Mapping[str, Any]:
        """Call a tool that works."""
        result, error = await self.call(name, token, **arguments)
        assert result is not None, error
        return result

    async def error(self, name: str, token: str | None = None, **arguments: Any) -> dict[str, Any]:
        """Call a tool that fails; return its error without the correlation id."""
        result, error = await self.call(name, token, **arguments)
        assert error is not None, result
        return {key: value for key, value in error.items() if key != "correlation_id"}

    async def open(
        self, token: str | None = None, tools: Sequence[Mapping[str, Any]] = TOOLS, **arguments: Any
    ) -> str:
        """Open a session that lends ``tools``."""
        context = {"caller_id": "ant", "caller_tools": list(tools)}
        members = {"node_id": self.node.node_id, "context": context, **arguments}
        result = await self.result("session_message", token, **members)
        return str(result["session_id"])

    async def not_opened(self, node_id: str | None = None, **context: Any) -> dict[str, Any]:
        """Return the error of a session that is not opened; its context has ``context``."""
        named, context = node_id or self.node.node_id, {"caller_id": "ant", **context}
        return await self.error("session_message", node_id=named, context=context)

    async def events(self, session_id: str, after: int = 0, **arguments: Any) -> list[Mapping[str, Any]]:
        """Return the events behind ``after`` that there are now."""
        members = {"session_id": session_id, "after": after, "wait_ms": 0, **arguments}
        return list((await self.result("session_events", **members))["events"])
