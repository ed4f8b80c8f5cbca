"""The methods of the socket: one table. Must not know how a line is read or written."""

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Protocol

from kubelet.caller_tools.json_rpc import INVALID_PARAMS, METHOD_NOT_FOUND, JsonRpcRequest, RpcError
from kubelet.caller_tools.requests import CallerRequests, Send
from kubelet.caller_tools.sessions import Session, Sessions
from schemas.caller_tools import MAX_VALUE_BYTES, size_of
from schemas.errors import Failure, ToolError
from schemas.frames import OneWayType

_SEVERAL = "More than one session is live, and this connection is attached to none."
_ATTACH = "Attach the connection to one of them: session_attach, or edge-kubelet mcp --session ID."
_NONE = "No session is live, and no tool is lent."
_ENDED = "The session of this connection has ended."


class Attachable(Protocol):
    """What a method needs of the connection it was called on."""

    attached_to: str | None

    def session(self) -> Session | None:
        """Return the session that this connection sees."""

    def refresh(self) -> None:
        """Notify the client of what it can use now."""


_Method = Callable[["LocalMethods", Attachable, Mapping[str, Any]], Awaitable[Any]]


class LocalMethods:
    """What local clients can request of this node."""

    def __init__(self, node_id: str, sessions: Sessions, requests: CallerRequests, send: Send) -> None:
        self._node_id = node_id
        self._sessions = sessions
        self._requests = requests
        self._send = send

    async def call(self, client: Attachable, request: JsonRpcRequest) -> Any:
        """Return the result of ``request``.

        Raises:
            RpcError: there is no such method, or its parameters are not valid.
            ToolError: it fails.
        """
        method = _METHODS.get(request.method)
        if method is None:
            raise RpcError(METHOD_NOT_FOUND, "no such method")
        return await method(self, client, request.params)

    async def caller_tool(self, client: Attachable, params: Mapping[str, Any]) -> Any:
        """Return the result of a tool that the session's caller lends."""
        _check_members(params, {"tool", "arguments", "caller_id"})
        tool, arguments = _text(params, "tool"), params.get("arguments", {})
        if not isinstance(arguments, dict):
            raise RpcError(INVALID_PARAMS, "arguments is an object")
        session = self._session_of(client)
        if "caller_id" in params and _text(params, "caller_id") != session.caller_id:
            # The client has not read yet that its session was followed by another: not redirected.
            raise ToolError(Failure.CALLER_TOOL_UNKNOWN)
        return await self._requests.request(session, tool, arguments)

    async def session_attach(self, client: Attachable, params: Mapping[str, Any]) -> Any:
        """Bind the connection to one session."""
        _check_members(params, {"session_id"})
        session_id = _text(params, "session_id")
        if client.attached_to not in {None, session_id}:
            raise RpcError(INVALID_PARAMS, "this connection is attached to another session: open a new one")
        session = self._sessions.get(session_id)
        if session is None:
            raise ToolError(Failure.SESSION_UNKNOWN, "No such session is live.")
        client.attached_to = session_id
        client.refresh()
        return {"session_id": session_id, "caller_id": session.caller_id}

    async def session_reply(self, client: Attachable, params: Mapping[str, Any]) -> Any:
        """Send a message to the session's caller."""
        _check_members(params, {"message"})
        message = _text(params, "message")
        if size_of(message) > MAX_VALUE_BYTES:
            raise ToolError(Failure.ARGUMENTS_INVALID, "The message is larger than 192 KiB.")
        session = self._session_of(client)
        event = {"session_id": session.session_id, "message": message}
        if not self._send(OneWayType.SESSION_EVENT, event):
            raise ToolError(Failure.CALLER_DISCONNECTED, "The relay is not reached; nothing was sent.")
        return {}

    async def node(self, client: Attachable, params: Mapping[str, Any]) -> Any:  # noqa: ARG002 - as the others
        """Return which node this is."""
        _check_members(params, set())
        return {"node_id": self._node_id}

    def _session_of(self, client: Attachable) -> Session:
        session = client.session()
        if session is not None:
            return session
        if client.attached_to is not None:
            raise ToolError(Failure.SESSION_UNKNOWN, _ENDED)
        if len(self._sessions):
            raise ToolError(Failure.CALLER_TOOL_UNKNOWN, _SEVERAL, fix=_ATTACH)
        raise ToolError(Failure.CALLER_TOOL_UNKNOWN, _NONE)


_METHODS: Mapping[str, _Method] = {
    "caller_tool": LocalMethods.caller_tool,
    "session_attach": LocalMethods.session_attach,
    "session_reply": LocalMethods.session_reply,
    "node": LocalMethods.node,
}


def _check_members(params: Mapping[str, Any], known: set[str]) -> None:
    if not params.keys() <= known:
        raise RpcError(INVALID_PARAMS, "params has a member that this method does not know")


def _text(params: Mapping[str, Any], name: str) -> str:
    value = params.get(name)
    if not isinstance(value, str):
        raise RpcError(INVALID_PARAMS, f"{name} is a text")
    return value
