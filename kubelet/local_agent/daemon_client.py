"""The connection to the daemon's socket, kept up until cancelled: a plain client of it.

The daemon may be of another version than this program: what it sends is checked. While it is absent nothing
is lent; what was requested of it fails. Must not know MCP.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any, Protocol

from structlog.typing import FilteringBoundLogger

from kubelet.caller_tools import json_rpc
from kubelet.caller_tools.json_rpc import LineSplitter
from schemas.error_roots import PeerError
from schemas.errors import Failure, ToolError
from schemas.pacing import Backoff
from schemas.projection import is_node_id
from schemas.strict_json import StrictJsonError, loads
from schemas.text import printable

MAX_LINE_BYTES = 1 << 20
"""More than the daemon sends in one line."""
PROBE_AFTER_S = 5.0
"""How long a request waits before the daemon is asked whether it is there, and how long for that answer."""
_READ_BYTES = 1 << 16
_TOO_LARGE = "The arguments are larger than 192 KiB as compact ASCII JSON."


class DaemonMessageError(PeerError):
    """A line is no message that this version reads; the text, printable, states why."""


def read(line: bytes) -> Mapping[str, Any]:
    """Return the message in ``line``: a notification, whose params have the form of its type, or a response.

    Raises:
        DaemonMessageError: it is malformed.
    """
    try:
        message = loads(line, max_bytes=MAX_LINE_BYTES)
    except StrictJsonError as error:
        raise DaemonMessageError(f"it is {error.reason}") from None
    if not isinstance(message, dict):
        raise DaemonMessageError("it is no object")
    match message.get("type"):
        case "caller_tools_config":
            params = _member(message, "params", dict)
            _member(params, "caller_id", str)
            for tool in _member(params, "tools", list):
                _check_tool(tool)
        case "session_message":
            params = _member(message, "params", dict)
            _member(params, "session_id", str)
            _member(params, "message", str)
        case _ if message.get("error") is not None:
            data = _member(message, "error", dict).get("data", {})
            if not isinstance(data, dict) or not isinstance(data.get("caller_message"), str | None):
                raise DaemonMessageError("its error has data of another form")
    return message


def _check_tool(tool: object) -> None:
    if not isinstance(tool, dict):
        raise DaemonMessageError("a tool is no object")
    _member(tool, "name", str)
    _member(tool, "inputSchema", dict)
    if not all(isinstance(tool.get(name, ""), str) for name in ("title", "description")):
        raise DaemonMessageError("a tool's title or description is no text")


def _member(holder: Mapping[str, Any], name: str, form: type[Any]) -> Any:
    value = holder.get(name)
    if not isinstance(value, form):
        raise DaemonMessageError(f"its member {name} is missing, or of another form")
    return value


class Follower(Protocol):
    """What is called back with what the daemon sends."""

    def node_known(self, node_id: str) -> None:
        """Note which node this is."""

    def lend(self, caller_id: str, tools: list[Mapping[str, Any]]) -> None:
        """Replace what is lent."""

    def withdraw(self) -> None:
        """Note that nothing is lent: the daemon is not reached."""

    def message(self, session_id: str, message: str) -> None:
        """Take a message of the caller of a session."""


class ResponseError(ToolError):
    """The daemon answered a request with an error.

    Attributes:
        sent: the error envelope that it sent; empty for an error of the protocol.
        caller_text: what the caller gave as the reason of its own tool's failure, if it was that.
    """

    def __init__(self, error: Mapping[str, Any]) -> None:
        super().__init__(Failure.INTERNAL)
        self.sent = dict(error.get("data", {}))
        self.caller_text: str | None = self.sent.pop("caller_message", None)

    def __str__(self) -> str:
        return str(self.sent.get("message", super().__str__()))


class DaemonClient:
    """Requests to the daemon at ``path``, attached to one session if one is named."""

    def __init__(  # noqa: PLR0913, PLR0917 - what comes in from outside
        self,
        path: Path,
        session_id: str | None,
        follower: Follower,
        backoff: Backoff,
        log: FilteringBoundLogger,
        probe_after_s: float = PROBE_AFTER_S,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._path = path
        self._session_id = session_id
        self._follower = follower
        self._backoff = backoff
        self._log = log
        self._probe_after_s = probe_after_s
        self._sleep = sleep
        self._writer: asyncio.StreamWriter | None = None
        self._ids = count(1)
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._is_attached = False
        self._lending: Mapping[str, Any] | None = None

    async def run(self) -> None:
        while True:
            try:
                reader, writer = await asyncio.open_unix_connection(self._path)
            except OSError as error:
                self._log.info("daemon not reached", socket=str(self._path), reason=printable(str(error)))
            else:
                await self._serve(reader, writer)
            await self._sleep(self._backoff.next_s())

    async def request(self, method: str, params: Mapping[str, Any]) -> Any:
        """Return the result of a request, which may take long while the daemon is there. It can be cancelled.

        Raises:
            ToolError: it failed, or the daemon is not reached.
        """
        # Until it is attached, the daemon would pass it on to the only session: another one.
        if self._session_id is not None and self._writer is not None and not self._is_attached:
            raise ToolError(Failure.SESSION_UNKNOWN, "The session of this agent is not live.")
        return await self._request(method, params)

    async def _request(self, method: str, params: Mapping[str, Any]) -> Any:
        with self._asked(method, params) as answer:
            while not await self._is_answered(answer):
                await self._probe()
            return answer.result()

    async def _probe(self) -> None:
        """Give the connection up if the daemon does not answer what it answers at once."""
        writer = self._writer
        with self._asked("node", {}) as answer:
            if not await self._is_answered(answer) and writer is not None:
                self._log.warning("daemon does not answer", socket=str(self._path))
                writer.transport.abort()

    async def _is_answered(self, answer: "asyncio.Future[Any]") -> bool:
        done, _ = await asyncio.wait([answer], timeout=self._probe_after_s)
        return bool(done)

    @contextmanager
    def _asked(self, method: str, params: Mapping[str, Any]) -> "Iterator[asyncio.Future[Any]]":
        """Send a request, and yield its answer to come; cancel it at the daemon if the block is cancelled."""
        writer = self._writer
        if writer is None or writer.is_closing():
            raise ToolError(Failure.NODE_OFFLINE, "The daemon of this node is not reached; nothing was sent.")
        id_ = next(self._ids)
        line = json_rpc.request(id_, method, params)
        if len(line) > json_rpc.MAX_LINE_BYTES:
            # The daemon refuses such a line unread, so without its id: the request would never end.
            raise ToolError(Failure.ARGUMENTS_INVALID, _TOO_LARGE)
        answer = self._waiting[id_] = asyncio.get_running_loop().create_future()
        try:
            writer.write(line)
            yield answer
        except asyncio.CancelledError:
            if not writer.is_closing():
                writer.write(json_rpc.request(next(self._ids), "cancel", {"id": id_}))
            raise
        finally:
            self._waiting.pop(id_, None)
            if answer.done():
                answer.exception()  # else asyncio reports an error that came too late for what waited

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writer = writer
        self._log.info("daemon connected", socket=str(self._path))
        greeting = asyncio.create_task(self._greet(writer))
        splitter = LineSplitter(MAX_LINE_BYTES)
        try:
            while data := await reader.read(_READ_BYTES):
                for line in splitter.feed(data):
                    self._take(line)
        except OSError as error:
            self._log.info("daemon lost", reason=printable(str(error)))
        except DaemonMessageError as error:
            self._log.error("message of the daemon not read", reason=str(error))
        finally:
            self._writer = None
            writer.close()
            self._lose()
            greeting.cancel()
            await asyncio.wait([greeting])
        if not greeting.cancelled():
            greeting.result()

    def _lose(self) -> None:
        for answer in self._waiting.values():
            if not answer.done():
                lost = "The daemon of this node was lost; the caller's tool may have run."
                answer.set_exception(ToolError(Failure.CALLER_DISCONNECTED, lost))
        self._is_attached, self._lending = False, None
        self._follower.withdraw()

    async def _greet(self, writer: asyncio.StreamWriter) -> None:
        """Learn which node this is, and attach."""
        try:
            answer = await self._request("node", {})
            if not isinstance(answer, dict) or not is_node_id(str(answer.get("node_id"))):
                # Of another version: it may be replaced meanwhile.
                self._log.error("message of the daemon not read", reason="it names no node")
                writer.close()
                return
            self._follower.node_known(answer["node_id"])
            await self._attach()
        except ToolError as error:
            self._log.info("daemon lost", reason=str(error))
            return
        self._backoff.reset()
        self._is_attached = True
        if self._lending is not None:
            self._follower.lend(self._lending["caller_id"], self._lending["tools"])

    async def _attach(self) -> None:
        """Attach to the session; the relay may name it again only after a while."""
        while self._session_id is not None:
            try:
                await self._request("session_attach", {"session_id": self._session_id})
            except ResponseError as error:
                self._log.info("session not live", reason=printable(str(error)))
                await self._sleep(self._backoff.next_s())
            else:
                return

    def _take(self, line: bytes | None) -> None:
        if line is None:
            self._log.error("the daemon sends a line over the limit")
            return
        message = read(line)
        match message.get("type"):
            case "caller_tools_config":
                lending = self._lending = message["params"]
                # Not before: until then this may be what another session lends.
                if self._is_attached:
                    self._follower.lend(lending["caller_id"], lending["tools"])
            case "session_message":
                params = message["params"]
                # Not of another session: until it is attached, it is sent those of the only one.
                if self._session_id in {None, params["session_id"]}:
                    self._follower.message(params["session_id"], params["message"])
            case _:
                request_id = message.get("id")
                answer = self._waiting.get(request_id) if isinstance(request_id, int) else None
                if answer is None or answer.done():
                    return
                if (error := message.get("error")) is None:
                    answer.set_result(message.get("result"))
                else:
                    answer.set_exception(ResponseError(error))
