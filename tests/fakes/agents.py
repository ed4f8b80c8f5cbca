"""A caller that lends tools, on the official MCP client, in the era that a test names."""

import asyncio
import itertools
import json
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any, Final

import httpx2
from mcp.client.client import Client
from mcp.client.stdio import StdioServerParameters, stdio_client
from mcp.client.streamable_http import streamable_http_client
from mcp.shared.subscriptions import ResourceUpdated
from mcp_types import (
    CallToolResult,
    LoggingMessageNotificationParams,
    ResourceUpdatedNotification,
    TextContent,
    TextResourceContents,
    Tool,
)

from relay.cli.demo.local_system import LocalSystem
from schemas.addresses import mcp_url
from schemas.registry import SchemaRegistry
from schemas.times import iso
from schemas.tls import client_context
from tests.fakes.caller_stage import TOOLS
from tests.fakes.demo import TIMEOUT

BOUND_S: Final = 30
NEW: Final = "2026-07-28"
LEGACY: Final = "legacy"


class LendingCaller:
    """One client, its sessions, and the log messages that it has received.

    Attributes:
        cursors: the ``next`` of the last answer, by session.
        sessions: those that it has opened and not ended.
    """

    def __init__(self, mode: str) -> None:
        self.mode = mode
        self.client: Client
        self.logs: asyncio.Queue[LoggingMessageNotificationParams] = asyncio.Queue()
        self.cursors: dict[str, int] = {}
        self.sessions: set[str] = set()
        self._unread: list[Mapping[str, Any]] = []

    @classmethod
    @asynccontextmanager
    async def open(
        cls, mcp_url: str, token: str, mode: Any, log_level: Any = "info"
    ) -> AsyncIterator["LendingCaller"]:
        """Hold a caller, connected."""
        caller = cls(mode)
        headers = {"Authorization": f"Bearer {token}"}
        # A stream on which nothing is to be said yet is not broken.
        timeout = httpx2.Timeout(BOUND_S, read=300)
        async with httpx2.AsyncClient(
            headers=headers, timeout=timeout, trust_env=False, verify=client_context()
        ) as http:
            transport = streamable_http_client(mcp_url, http_client=http)
            client = Client(transport, mode=mode, logging_callback=caller._logged, log_level=log_level)
            async with client as caller.client:
                yield caller

    async def _logged(self, params: LoggingMessageNotificationParams) -> None:
        self.logs.put_nowait(params)

    async def log(self) -> LoggingMessageNotificationParams:
        """Return the next log message."""
        return await asyncio.wait_for(self.logs.get(), BOUND_S)

    async def try_call(self, name: str, **arguments: Any) -> CallToolResult:
        """Call a tool of the relay."""
        return await asyncio.wait_for(self.client.call_tool(name, arguments), BOUND_S + 60)

    async def call(self, name: str, **arguments: Any) -> dict[str, Any]:
        """Call a tool of the relay that works."""
        result = await self.try_call(name, **arguments)
        assert not result.is_error, result.content
        content: dict[str, Any] = result.structured_content
        return content

    async def lend(
        self,
        node: str,
        tools: Sequence[Mapping[str, Any]] = TOOLS,
        caller_id: str = "ant",
        **arguments: Any,
    ) -> str:
        """Open a session with ``node`` that lends ``tools``."""
        context = {"caller_id": caller_id, "caller_tools": list(tools)}
        result = await self.call("session_message", node_id=node, context=context, **arguments)
        session_id = str(result["session_id"])
        self.sessions.add(session_id)
        return session_id

    async def end(self, session_id: str) -> None:
        self.sessions.discard(session_id)
        await self.call("session_message", session_id=session_id, end=True)

    async def event(self, session_id: str, type_: str = "caller_tool_request") -> Mapping[str, Any]:
        """Return the next event of ``type_`` as this era has it: a log message, or the answer of a poll."""
        async with asyncio.timeout(BOUND_S):
            while True:
                event = await (self._pushed() if self.mode == LEGACY else self._polled(session_id))
                if event["session_id"] == session_id and event["type"] == type_:
                    return event

    async def _pushed(self) -> Mapping[str, Any]:
        data: Mapping[str, Any] = (await self.log()).data
        return data

    async def _polled(self, session_id: str) -> Mapping[str, Any]:
        while not self._unread:
            after = self.cursors.get(session_id, 0)
            answer = await self.call("session_events", session_id=session_id, after=after, wait_ms=20_000)
            self.cursors[session_id] = answer["next"]
            self._unread += answer["events"]
        return self._unread.pop(0)

    async def answer(self, event: Mapping[str, Any], result: Any) -> None:
        await self.call(
            "caller_tool_response",
            session_id=event["session_id"],
            request_id=event["request_id"],
            result=result,
        )


# --- An agent that follows the telemetry of a node, on the official MCP client, in the era that a test names.


SECOND: Final = {"interval_ms": 1000, "include": ["mem", "load"]}
MEMBERS: Final = {"ts_ms", "node_id", "uptime_s", "mem", "load"}

Updates = AbstractAsyncContextManager[Callable[[], Awaitable[str]]]
"""While it is open, a client is notified of a resource; yields what waits for the next time, for its URI."""


def checked(sample: Any, node: str) -> dict[str, Any]:
    """Return the sample after checking that it is one of ``node``, without its time as a model reads it."""
    bare = dict(sample)
    assert bare.pop("ts", None) in (None, iso(bare["ts_ms"]))
    SchemaRegistry().load("system.metrics.sample@1.0.0").check(bare)
    assert bare["node_id"] == node
    return bare


class FollowingAgent:
    """One client, and the node that it follows."""

    def __init__(self, client: Client, era: str, node: str, updated: asyncio.Queue[str]) -> None:
        self._client = client
        self._era = era
        self._node = node
        self._updated = updated
        self.tool = f"sys.{node}.sysmetrics.subscribe"
        self.uri = f"node://{node}/telemetry"

    @classmethod
    @asynccontextmanager
    async def connected(cls, system: LocalSystem, era: str, node: str) -> AsyncIterator["FollowingAgent"]:
        """Hold an agent of the relay of ``system``; ``era`` is as ``mcp.client.Client`` has it."""
        updated: asyncio.Queue[str] = asyncio.Queue()

        async def noted(message: Any) -> None:
            if isinstance(message, ResourceUpdatedNotification):
                updated.put_nowait(str(message.params.uri))

        headers = {"Authorization": f"Bearer {system.token}"}
        async with httpx2.AsyncClient(headers=headers, timeout=TIMEOUT) as http:
            transport = streamable_http_client(mcp_url(system.plan.url), http_client=http)
            async with Client(transport, mode=era, message_handler=noted) as client:
                yield cls(client, era, node, updated)

    async def call(self, arguments: Mapping[str, Any], **options: Any) -> CallToolResult:
        return await self._client.call_tool(self.tool, dict(arguments), **options)

    async def read(self, query: str = "") -> dict[str, Any]:
        """Return the newest sample; with a ``query``, the history."""
        [content] = (await self._client.read_resource(self.uri + query, cache_mode="bypass")).contents
        assert isinstance(content, TextResourceContents)
        read: dict[str, Any] = json.loads(content.text)
        return read

    async def progress(self, count: int) -> list[tuple[float, dict[str, Any]]]:
        """Follow the node by a call that stays open, until ``count`` samples came; return them by number."""
        received: asyncio.Queue[tuple[float, Any]] = asyncio.Queue()

        async def progress(number: float, _total: float | None, message: str | None) -> None:
            received.put_nowait((number, json.loads(message or "null")))

        call = asyncio.create_task(self.call(SECOND, progress_callback=progress))
        samples = [await received.get() for _ in range(count)]
        assert not call.done()
        call.cancel()
        await asyncio.wait([call])
        return [(number, checked(sample, self._node)) for number, sample in samples]

    def notified(self) -> Updates:
        """Follow the resource as the client's era does."""
        return self._subscribed() if self._era == "legacy" else self._listening()

    @asynccontextmanager
    async def _subscribed(self) -> AsyncIterator[Callable[[], Awaitable[str]]]:
        await self._client.session.subscribe_resource(self.uri)
        yield self._updated.get
        await self._client.session.unsubscribe_resource(self.uri)

    @asynccontextmanager
    async def _listening(self) -> AsyncIterator[Callable[[], Awaitable[str]]]:
        async with self._client.listen(resource_subscriptions=[self.uri]) as events:

            async def following() -> str:
                event = await anext(aiter(events))
                assert isinstance(event, ResourceUpdated)
                return event.uri

            yield following


# --- A node's local agent: the official MCP client of ``kubelet mcp``, and a client of the bare socket.


_POLL_S: Final = 0.02


class NodeAgent:
    """A local agent, which knows nothing but MCP."""

    def __init__(self) -> None:
        self.client: Client

    @classmethod
    @asynccontextmanager
    async def running(
        cls, state_dir: Path, session: str | None = None, mode: Any = "auto"
    ) -> AsyncIterator["NodeAgent"]:
        """Hold an agent of the node in ``state_dir``, bound to ``session`` if that is given."""
        agent = cls()
        python, *arguments = [sys.executable, "-P", "-m", "kubelet", "mcp", "--state-dir", str(state_dir)]
        arguments += ["--session", session] if session is not None else []
        server = StdioServerParameters(command=python, args=arguments)
        transport = stdio_client(server, errlog=sys.__stderr__ or sys.stderr)
        async with Client(transport, mode=mode, cache=None) as agent.client:
            yield agent

    async def lent(self, *names: str) -> dict[str, Tool]:
        """Wait until the lent tools are exactly those of these names; return them."""
        async with asyncio.timeout(BOUND_S):
            while True:
                listed = {tool.name: tool for tool in (await self.client.list_tools()).tools}
                lent = {name: tool for name, tool in listed.items() if _is_lent(name)}
                if set(lent) == set(names):
                    return lent
                await asyncio.sleep(_POLL_S)

    async def call(self, name: str, **arguments: Any) -> CallToolResult:
        return await asyncio.wait_for(self.client.call_tool(name, arguments), BOUND_S + 60)


def _is_lent(name: str) -> bool:
    # The names of the node's own tools, and of those for messages, have no underscore.
    return "_" in name


def text_of(result: CallToolResult) -> str:
    return "".join(item.text for item in result.content if isinstance(item, TextContent))


def error_of(result: CallToolResult) -> dict[str, Any]:
    """Return the error envelope of a call that failed."""
    assert result.is_error
    envelope: dict[str, Any] = json.loads(text_of(result))
    return envelope


class SocketClient:
    """A local process at the node's Unix socket.

    Attributes:
        notified: what it was notified of.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.notified: asyncio.Queue[Mapping[str, Any]] = asyncio.Queue()
        self._reader = reader
        self._writer = writer
        self._ids = itertools.count(1)
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}

    @classmethod
    @asynccontextmanager
    async def connected(cls, socket: Path) -> AsyncIterator["SocketClient"]:
        """Hold a connection."""
        reader, writer = await asyncio.open_unix_connection(str(socket), limit=1 << 20)
        client = cls(reader, writer)
        reading = asyncio.create_task(client._read())
        try:
            yield client
        finally:
            reading.cancel()
            writer.close()

    async def _read(self) -> None:
        while line := await self._reader.readline():
            message = json.loads(line)
            if "id" in message and message["id"] in self._answers:
                self._answers.pop(message["id"]).set_result(message)
            else:
                self.notified.put_nowait(message)

    async def ask(self, method: str, **params: Any) -> dict[str, Any]:
        """Send a request and return its response."""
        number = next(self._ids)
        self._answers[number] = asyncio.get_running_loop().create_future()
        answer = self._answers[number]
        self.send({"jsonrpc": "2.0", "id": number, "method": method, "params": params})
        return await asyncio.wait_for(answer, BOUND_S + 60)

    async def notification(self, type_: str) -> Mapping[str, Any]:
        """Return the parameters of the next notification of that type."""
        async with asyncio.timeout(BOUND_S):
            while True:
                message = await self.notified.get()
                if message.get("type") == type_:
                    params: Mapping[str, Any] = message["params"]
                    return params

    def send(self, message: object) -> None:
        self.send_raw(json.dumps(message).encode() + b"\n")

    def send_raw(self, data: bytes) -> None:
        self._writer.write(data)
