"""The socket that local agents connect to: who is accepted, what they request, and what they are notified of.

What a client sends is metered before it is parsed; one that breaks a rule gets an error and may go on, one
that does not read is disconnected. Must not decide what a session lends: ``sessions`` and ``requests`` do.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any

from structlog.typing import FilteringBoundLogger

from kubelet.caller_tools import json_rpc
from kubelet.caller_tools.json_rpc import (
    INVALID_PARAMS,
    METHOD_NOT_FOUND,
    JsonRpcRequest,
    LineSplitter,
    RequestId,
    RpcError,
)
from kubelet.caller_tools.requests import CallerFailedError, CallerRequests, Send
from kubelet.caller_tools.sessions import Session, Sessions
from kubelet.caller_tools.socket_file import BoundSocket, Peer, peer_of
from schemas.caller_tools import MAX_VALUE_BYTES, size_of
from schemas.errors import Failure, ToolError
from schemas.faults import OncePerPlace
from schemas.frames import OneWayType
from schemas.pacing import TokenBucket
from schemas.websocket_frames import FrameBudget, FrameHead

_SEVERAL = "More than one session is live, and this connection is attached to none."
_ATTACH = "Attach the connection to one of them: session_attach, or edge-kubelet mcp --session ID."
_NONE = "No session is live, and no tool is lent."
_ENDED = "The session of this connection, or of its message, has ended."
MAX_IN_FLIGHT = 256
MAX_UNSENT_BYTES = 2 << 20
"""What a client may leave unread before it is disconnected."""
READ_BYTES = 1 << 16
_LINES_PER_S = 1000.0
_LINES_AT_ONCE = 4000.0
_BYTES_LIKE_A_LINE = 4096
_CLOSED_WITHIN_S = 5.0
_BUSY_RETRY_MS = 1000
_REPLIES_PER_S, _REPLIES_AT_ONCE = 12.0, 60.0
"""Of the 20 frames a second, 120 at once, that the relay reads: it disconnects a node that stays behind."""
_FRAMES_OF_A_MESSAGE, _MOST_CREDIT = 16.0, 1024.0
"""What it reads besides, because of a message of a caller."""
MAX_CLIENTS = 16
MAX_CLIENTS_OF_ONE_USER = 8
_LOG_INTERVAL_S = 1.0
_ATTACHES_WITHIN_S = 0.5
"""So long a new connection is given no message that was kept: it may attach to another session."""


_Method = Callable[["LocalMethods", "Client", Mapping[str, Any]], Awaitable[Any]]


class LocalMethods:
    """What local clients can request of this node.

    Attributes:
        is_connected: whether the node is connected to its relay.
    """

    def __init__(self, node_id: str, sessions: Sessions, requests: CallerRequests, send: Send) -> None:
        self._node_id = node_id
        self._sessions = sessions
        self._requests = requests
        self._send = send
        bucket = TokenBucket(_REPLIES_PER_S, _REPLIES_AT_ONCE, 0.0)
        self._replies = FrameBudget(bucket, bytes_like_a_frame=_BYTES_LIKE_A_LINE, most_credit=_MOST_CREDIT)
        self.is_connected = False

    async def call(self, client: "Client", request: JsonRpcRequest) -> Any:
        """Return the result of ``request``.

        Raises:
            RpcError: there is no such method, or its parameters are not valid.
            ToolError: it fails.
        """
        method = _METHODS.get(request.method)
        if method is None:
            raise RpcError(METHOD_NOT_FOUND, "no such method")
        return await method(self, client, request.params)

    def expect_reply(self) -> None:
        """Let more be replied: the relay has sent a message of a caller."""
        self._replies.expect(_FRAMES_OF_A_MESSAGE)

    async def caller_tool(self, client: "Client", params: Mapping[str, Any]) -> Any:
        _check_members(params, {"tool", "arguments", "caller_id"})
        tool, arguments = _text(params, "tool"), params.get("arguments", {})
        if not isinstance(arguments, dict):
            raise RpcError(INVALID_PARAMS, "arguments is an object")
        session = self._session_of(client)
        if "caller_id" in params and _text(params, "caller_id") != session.caller_id:
            # The client has not read yet that its session was followed by another: not redirected.
            raise ToolError(Failure.CALLER_TOOL_UNKNOWN)
        return await self._requests.request(session, tool, arguments)

    async def session_attach(self, client: "Client", params: Mapping[str, Any]) -> Any:
        _check_members(params, {"session_id"})
        session_id = _text(params, "session_id")
        if client.attached_to not in {None, session_id}:
            raise RpcError(INVALID_PARAMS, "this connection is attached to another session: open a new one")
        session = self._sessions.get(session_id)
        client.attach(session)
        if session is None:
            raise ToolError(Failure.SESSION_UNKNOWN, "No such session is live.")
        return {"session_id": session_id, "caller_id": session.caller_id}

    async def session_reply(self, client: "Client", params: Mapping[str, Any]) -> Any:
        _check_members(params, {"message", "session_id"})
        message = _text(params, "message")
        if size_of(message) > MAX_VALUE_BYTES:
            raise ToolError(Failure.ARGUMENTS_INVALID, "The message is larger than 192 KiB.")
        session = self._session_of(client)
        if "session_id" in params and _text(params, "session_id") != session.session_id:
            # Of a message whose session was followed by another since: not for that one's caller.
            raise ToolError(Failure.SESSION_UNKNOWN, _ENDED)
        event = {"session_id": session.session_id, "message": message}
        head = FrameHead(is_control=False, is_text=True, payload_bytes=size_of(message), head_bytes=0)
        is_late = self._replies.take(head, asyncio.get_running_loop().time()) > 0
        if is_late or not self._send(OneWayType.SESSION_EVENT, event):
            if self.is_connected:
                # Over the rate, or what the relay does not read; neither lasts.
                raise ToolError(Failure.RATE_LIMITED, retry_after_ms=_BUSY_RETRY_MS)
            raise ToolError(Failure.CALLER_DISCONNECTED, "The relay is not reached; nothing was sent.")
        return {}

    async def node(self, client: "Client", params: Mapping[str, Any]) -> Any:  # noqa: ARG002 - as the others
        _check_members(params, set())
        return {"node_id": self._node_id}

    def _session_of(self, client: "Client") -> Session:
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


@dataclass(frozen=True, slots=True)
class ClientParts:
    """What every client shares."""

    sessions: Sessions
    methods: LocalMethods
    log: FilteringBoundLogger
    counts: Counter[str]
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep


class Client:
    """One connection.

    Attributes:
        attached_to: the id of the session that this connection is bound to, if it is.
        hears: whether it is given the messages of the session that it sees.
    """

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, parts: ClientParts
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._parts = parts
        self._splitter = LineSplitter()
        self._bucket = TokenBucket(_LINES_PER_S, _LINES_AT_ONCE, asyncio.get_running_loop().time())
        self._running: dict[RequestId, asyncio.Task[None]] = {}
        self._shown: tuple[Session, Mapping[str, Any]] | None = None
        self.attached_to: str | None = None
        self.hears = True
        self._hears_kept = False
        self._settling = asyncio.get_running_loop().call_later(_ATTACHES_WITHIN_S, self._settle)

    def session(self) -> Session | None:
        """Return the session that this client sees: its own, or the only one that is live."""
        if self._writer.is_closing():
            return None  # a message for it would be lost; the next client reads it
        sessions = self._parts.sessions
        return sessions.only() if self.attached_to is None else sessions.get(self.attached_to)

    def attach(self, session: Session | None) -> None:
        """Bind it to ``session``; if that is not live, leave other sessions' messages to their clients."""
        if session is not None:
            self.attached_to = session.session_id
        self.hears = self.attached_to is not None
        self._settle()

    def _settle(self) -> None:
        self._settling.cancel()
        self._hears_kept = self.hears
        self.refresh()

    async def run(self) -> None:
        self.refresh()
        try:
            while data := await self._reader.read(READ_BYTES):
                await self._meter(len(data) / _BYTES_LIKE_A_LINE)
                for line in self._splitter.feed(data):
                    await self._meter(1.0)
                    self._take(line)
                # Requests and responses of others go on meanwhile, however much this client sends.
                await asyncio.sleep(0)
        finally:
            self._settling.cancel()
            for task in self._running.values():
                task.cancel()
            if self._running:
                await asyncio.wait(list(self._running.values()))

    def refresh(self) -> None:
        """Notify the client of the tools that it can use now, if they are others than before."""
        session = self.session()
        shown = self._shown
        if shown is not None and shown[0] is not session:
            self.notify("caller_tools_config", {"caller_id": shown[0].caller_id, "tools": []})
            self._shown = shown = None
        if session is None:
            return
        if shown is None or shown[1] is not session.tools:
            self._shown = (session, session.tools)
            tools = list(session.tools.values())
            self.notify("caller_tools_config", {"caller_id": session.caller_id, "tools": tools})
        while self._hears_kept and session.unread:
            self.deliver(session, session.unread.popleft()[0])

    def deliver(self, session: Session, message: str) -> None:
        self.notify("session_message", {"session_id": session.session_id, "message": message})

    def notify(self, type_: str, params: Mapping[str, Any]) -> None:
        self._send(json_rpc.notification(type_, params))

    def _send(self, line: bytes) -> None:
        if self._writer.is_closing():
            return
        self._writer.write(line)
        if self._writer.transport.get_write_buffer_size() > MAX_UNSENT_BYTES:
            self._parts.counts["clients_that_do_not_read"] += 1
            self._parts.log.warning("local client disconnected: it does not read what it is sent")
            self._writer.transport.abort()

    async def _meter(self, cost: float) -> None:
        loop = asyncio.get_running_loop()
        while (wait_s := self._bucket.take(loop.time(), cost)) > 0:
            self._parts.counts["clients_slowed"] += 1
            await self._parts.sleep(wait_s)

    def _take(self, line: bytes | None) -> None:
        if line is not None and not line.strip():
            return
        try:
            self._start(json_rpc.parse(line))
        except RpcError as error:
            self._parts.counts["malformed_lines"] += 1
            self._send(json_rpc.rpc_error(error))

    def _start(self, request: JsonRpcRequest) -> None:
        request_id = request.request_id
        if request_id is None:
            # By JSON-RPC a notification gets no response, and this protocol has none of a client.
            self._parts.counts["notifications_ignored"] += 1
            return
        if request.method == "cancel":
            # Here and not among the methods: it must work however many requests are in flight.
            cancelled = self._cancel(request_id, request.params)
            self._send(json_rpc.response(request_id, {"cancelled": cancelled}))
            return
        if request_id in self._running:
            # Without the id: with it, this would be read as the response to the request that runs.
            raise RpcError(json_rpc.INVALID_REQUEST, "the id is that of a request that is in flight")
        if len(self._running) >= MAX_IN_FLIGHT:
            self._refuse(request_id, ToolError(Failure.RATE_LIMITED, retry_after_ms=_BUSY_RETRY_MS))
            return
        task = asyncio.create_task(self._respond(request_id, request))
        self._running[request_id] = task
        task.add_done_callback(lambda _: self._running.pop(request_id))

    def _cancel(self, cancelling: RequestId, params: Mapping[str, Any]) -> bool:
        """Cancel the request of the id in ``params``, without a response; return whether it was in flight."""
        id_ = params.get("id")
        if params.keys() != {"id"} or not json_rpc.is_request_id(id_):
            text = "params has the id of a request, and nothing else"
            raise RpcError(json_rpc.INVALID_PARAMS, text, cancelling)
        running = self._running.get(id_)
        return running is not None and running.cancel()

    def _refuse(self, request_id: RequestId, error: ToolError) -> None:
        if error.failure is Failure.RATE_LIMITED:
            self._parts.counts["requests_refused"] += 1
        caller_text = error.text if isinstance(error, CallerFailedError) else None
        self._send(json_rpc.tool_error(request_id, error, caller_text))

    async def _respond(self, request_id: RequestId, request: JsonRpcRequest) -> None:
        try:
            result = await self._parts.methods.call(self, request)
            self._send(json_rpc.response(request_id, result))
        except RpcError as error:
            self._send(json_rpc.rpc_error(RpcError(error.code, str(error), request_id)))
        except ToolError as error:
            self._refuse(request_id, error)
        except Exception:
            # A bug must cost one request, not the connection.
            self._parts.log.exception("request of a local client failed")
            self._send(json_rpc.tool_error(request_id, ToolError(Failure.INTERNAL), None))


class SocketServer:
    """The connections of all local clients."""

    def __init__(self, parts: ClientParts) -> None:
        self._parts = parts
        self._clients: dict[Client, Peer] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._logged = OncePerPlace(_LOG_INTERVAL_S)
        self._group: int | None = None
        parts.sessions.on_change(self._changed)

    def __len__(self) -> int:
        return len(self._clients)

    @asynccontextmanager
    async def serving(self, bound: BoundSocket) -> AsyncIterator[None]:
        """Accept clients for the length of the block; at its end they are disconnected."""
        self._group = bound.group
        server = await asyncio.start_unix_server(self._connected, sock=bound.listener, limit=READ_BYTES)
        try:
            yield
        finally:
            server.close()
            for task in list(self._tasks):
                task.cancel()
            if self._tasks:
                await asyncio.wait(list(self._tasks))

    def deliver(self, session: Session, message: str) -> None:
        """Notify the clients of ``session`` of a message; keep it for the next one if there is none."""
        receivers = [client for client in self._clients if client.hears and client.session() is session]
        if session.unread:  # those come first
            receivers = []
        for client in receivers:
            client.deliver(session, message)
        if not receivers and not self._parts.sessions.keep_unread(session, message):
            self._parts.counts["messages_dropped"] += 1
            self._parts.log.warning("oldest message of a caller dropped: no local client reads it")

    def _changed(self, _ended: Session | None) -> None:
        for client in list(self._clients):
            client.refresh()

    def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # A task of our own: those that asyncio makes for coroutines cannot be awaited at the end.
        task = asyncio.create_task(self._serve(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        client: Client | None = None
        try:
            peer = peer_of(writer.get_extra_info("socket"))
            if self._is_accepted(peer):
                client = Client(reader, writer, self._parts)
                self._clients[client] = peer
                await client.run()
        except OSError:
            self._parts.counts["connections_broken"] += 1
        except Exception:
            # A bug must cost one connection, not the daemon.
            self._parts.log.exception("connection of a local client failed")
        finally:
            await _ended(writer)
            if client is not None:
                del self._clients[client]

    def _is_accepted(self, peer: Peer) -> bool:
        if not peer.may_use(self._group):
            return self._log(peer, "refused: neither its user nor its group may connect")
        users = Counter(other.uid for other in self._clients.values())
        if len(self._clients) >= MAX_CLIENTS or users[peer.uid] >= MAX_CLIENTS_OF_ONE_USER:
            return self._log(peer, "refused: too many connections")
        self._log(peer, "connected")
        return True

    def _log(self, peer: Peer, what: str) -> bool:
        """Log what became of a connection, and return False; one line a second for each user."""
        if what != "connected":
            self._parts.counts["connections_refused"] += 1
        place = f"{what} {peer.uid}"
        before = self._logged.suppressed_before(place, asyncio.get_running_loop().time())
        if before is not None:
            report = self._parts.log.info if what == "connected" else self._parts.log.warning
            report(f"local client {what}", pid=peer.pid, uid=peer.uid, gid=peer.gid, kept_back=before)
        return False


async def _ended(writer: asyncio.StreamWriter) -> None:
    """Close a connection, which counts until it is: what its client does not read is dropped."""
    writer.close()
    with suppress(OSError):
        try:
            async with asyncio.timeout(_CLOSED_WITHIN_S):
                await writer.wait_closed()
        except TimeoutError:
            writer.transport.abort()
