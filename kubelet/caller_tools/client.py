"""One connection of a local client: its requests, side by side, and what it is notified of.

What it sends is metered before it is parsed; a client that breaks a rule gets an error and may go on, one
that does not read is disconnected. Must not decide what a session lends: ``sessions`` and ``requests`` do.
"""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from structlog.typing import FilteringBoundLogger

from kubelet.caller_tools import json_rpc
from kubelet.caller_tools.json_rpc import JsonRpcRequest, RequestId, RpcError
from kubelet.caller_tools.lines import LineSplitter
from kubelet.caller_tools.methods import LocalMethods
from kubelet.caller_tools.requests import CallerFailedError
from kubelet.caller_tools.sessions import Session, Sessions
from schemas.errors import Failure, ToolError
from schemas.token_bucket import TokenBucket

MAX_IN_FLIGHT = 256
MAX_UNSENT_BYTES = 2 << 20
"""What a client may leave unread before it is disconnected."""
READ_BYTES = 1 << 16
_LINES_PER_S = 1000.0
_LINES_AT_ONCE = 4000.0
_BYTES_LIKE_A_LINE = 4096


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

    def session(self) -> Session | None:
        """Return the session that this client sees: its own, or the only one that is live."""
        sessions = self._parts.sessions
        return sessions.only() if self.attached_to is None else sessions.get(self.attached_to)

    async def run(self) -> None:
        """Serve until the client disconnects, or is disconnected."""
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
        while session.unread:
            self.deliver(session, session.unread.popleft())

    def deliver(self, session: Session, message: str) -> None:
        """Notify the client of a message of the caller."""
        self.notify("session_message", {"session_id": session.session_id, "message": message})

    def notify(self, type_: str, params: Mapping[str, Any]) -> None:
        """Send a notification."""
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
            self._refuse(request_id, ToolError(Failure.RATE_LIMITED, retry_after_ms=1000))
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
