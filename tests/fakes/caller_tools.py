"""Caller tools of a node whose relay is a list, and clients of its real Unix socket."""

import asyncio
import itertools
import json
import os
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from kubelet.caller_tools.assembly import CallerTools
from kubelet.caller_tools.sessions import CallerNames
from schemas.frames import ONE_WAY, OneWayType
from schemas.process.logs import make_logger
from schemas.registry import SchemaRegistry
from tests.fakes.lines import LogLines
from tests.fakes.polling import until
from tests.fakes.signer import NODE_ID

BOUND_S = 30
ANT, BEE = "gogol_20261122_020000_0000000a", "gogol_20261122_020000_0000000b"
OWNER, OTHER_OWNER = "a" * 64, "b" * 64
MEMORY: Mapping[str, Any] = {"name": "get_memory", "description": "Retrieve stored memories"}
SEND: Mapping[str, Any] = {
    "name": "send_response",
    "description": "Send a message",
    "inputSchema": {
        "type": "object",
        "properties": {"message": {"type": "string"}},
        "required": ["message"],
    },
}


class FakeRelay:
    """The relay's end of the frames: what was sent to it, and what it sends. ``is_up``: it takes frames."""

    def __init__(self, registry: SchemaRegistry) -> None:
        self._registry = registry
        self.sent: list[tuple[str, Mapping[str, Any]]] = []
        self.is_up = True
        self.tools: CallerTools

    def take(self, type_: OneWayType, payload: Mapping[str, Any]) -> bool:
        """Take a frame of the node, which must fit its document."""
        if self.is_up:
            self._check(type_, payload)
            self.sent.append((type_.value, payload))
        return self.is_up

    def of(self, type_: str) -> list[Mapping[str, Any]]:
        """Return the payloads of one type."""
        return [payload for sent, payload in self.sent if sent == type_]

    async def requests(self, count: int = 1) -> list[Mapping[str, Any]]:
        """Wait until the node has sent ``count`` requests, and return them all."""
        await until(lambda: len(self.of("caller_tool")) >= count)
        return self.of("caller_tool")

    def give(self, type_: str, payload: Mapping[str, Any]) -> None:
        """Send a frame to the node."""
        self._check(type_, payload)
        self.tools.handlers[ONE_WAY[type_]](payload)

    def open(
        self,
        session_id: str = ANT,
        caller_id: str = "ant",
        *tools: Mapping[str, Any],
        owner: str = OWNER,
        **others: Any,
    ) -> None:
        """Open a session, by default one that lends ``get_memory``."""
        lent = [dict(tool) for tool in tools or (MEMORY,)]
        opened = {"session_id": session_id, "caller_id": caller_id, "owner": owner, "tools": lent}
        self.give("session_open", {**opened, **others})

    def end(self, session_id: str = ANT) -> None:
        self.give("session_end", {"session_id": session_id, "reason": "ended"})

    def answer(self, request: Mapping[str, Any], result: Any) -> None:
        ids = {name: request[name] for name in ("session_id", "request_id")}
        self.give("caller_tool_result", {**ids, "result": result})

    def fail(self, request: Mapping[str, Any], code: str, message: str = "") -> None:
        """Answer ``request`` with an error."""
        ids = {name: request[name] for name in ("session_id", "request_id")}
        self.give("caller_tool_result", {**ids, "error": {"code": code, "message": message}})

    def _check(self, type_: str, payload: Mapping[str, Any]) -> None:
        frame = {"type": type_, "msg_id": "01ARZ3NDEKTSV4RRFFQ69G5FAV", "payload": payload}
        self._registry.load(f"session.{type_}@1.0.0").check(frame)


class SocketClient:
    """A local client that sends lines and reads them; responses are kept by id, notifications in order."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self.writer = writer
        self._ids = itertools.count(1)
        self._responses: dict[Any, dict[str, Any]] = {}
        self._notifications: list[dict[str, Any]] = []

    def send(self, method: str, params: Mapping[str, Any] | None = None, id_: Any = None) -> Any:
        """Send a request, and return its id."""
        id_ = next(self._ids) if id_ is None else id_
        message = {"jsonrpc": "2.0", "id": id_, "method": method, "params": params or {}}
        self.writer.write(json.dumps(message).encode() + b"\n")
        return id_

    async def request(self, method: str, params: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Send a request, and return its response."""
        return await self.response(self.send(method, params))

    async def response(self, id_: Any = None) -> dict[str, Any]:
        """Return the response with an id; None is that of an error without one."""
        async with asyncio.timeout(BOUND_S):
            while id_ not in self._responses:
                await self._read()
        return self._responses.pop(id_)

    async def notification(self) -> dict[str, Any]:
        async with asyncio.timeout(BOUND_S):
            while not self._notifications:
                await self._read()
        return self._notifications.pop(0)

    async def at_end(self) -> bool:
        """Return whether the server closes the connection, in its time."""
        async with asyncio.timeout(BOUND_S):
            while await self._read():
                pass
        return True

    async def _read(self) -> bool:
        line = await self._reader.readline()
        if not line:
            return False
        message = json.loads(line)
        if "type" in message:
            self._notifications.append(message)
        else:
            self._responses[message["id"]] = message
        return True


@asynccontextmanager
async def connected(path: Path) -> AsyncIterator[SocketClient]:
    reader, writer = await asyncio.open_unix_connection(path, limit=1 << 20)
    try:
        yield SocketClient(reader, writer)
    finally:
        writer.close()


@asynccontextmanager
async def served(
    path: Path,
    registry: SchemaRegistry,
    log: LogLines,
    **timeouts: float,
) -> AsyncIterator[FakeRelay]:
    """Serve the socket of a node, connected to the relay that is yielded."""
    relay = FakeRelay(registry)
    logger = make_logger("kubelet", log)
    tools = relay.tools = CallerTools(
        NODE_ID,
        relay.take,
        CallerNames(None, logger),
        os.urandom,
        logger,
        **timeouts,
    )
    async with tools.serving(path, group=None):
        tools.connected(resumed=False)
        yield relay
