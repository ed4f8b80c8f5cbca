"""A node's local agent: the official MCP client of ``kubelet mcp``, and a client of the bare socket."""

import asyncio
import itertools
import json
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

from mcp.client.client import Client
from mcp.client.stdio import StdioServerParameters, stdio_client
from mcp_types import CallToolResult, TextContent, Tool

BOUND_S: Final = 30
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
        """Call a tool."""
        return await asyncio.wait_for(self.client.call_tool(name, arguments), BOUND_S + 60)


def _is_lent(name: str) -> bool:
    # The names of the node's own tools, and of those for messages, have no underscore.
    return "_" in name


def text_of(result: CallToolResult) -> str:
    """Return the texts of a result."""
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
        """Send a line."""
        self.send_raw(json.dumps(message).encode() + b"\n")

    def send_raw(self, data: bytes) -> None:
        """Send anything."""
        self._writer.write(data)
