"""A client that speaks MCP in lines, over a bridge that runs in the test's own process."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

from relay.client.credentials import RenewableToken
from relay.client.stdio_bridge.bridge import Bridge
from relay.client.stdio_bridge.delivery import Conversation
from relay.client.stdio_bridge.http_client import RelayHttp
from schemas.process.logs import make_logger
from schemas.tls import client_context
from tests.fakes.lines import LogLines

BOUND_S = 30
OLD, NEW = "2025-11-25", "2026-07-28"
ME = {"name": "test", "version": "1"}
META = {
    "io.modelcontextprotocol/protocolVersion": NEW,
    "io.modelcontextprotocol/clientCapabilities": {},
    "io.modelcontextprotocol/clientInfo": ME,
}


class LineClient:
    """The client's end.

    Attributes:
        lines: every line that came so far, in order.
        log: what the bridge logged.
        ended: the bridge, which ends by itself once the input has.
    """

    def __init__(self, log: LogLines) -> None:
        self.lines: list[bytes] = []
        self.log = log
        self.ended: asyncio.Task[None] | None = None
        self._input: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._came: asyncio.Queue[bytes] = asyncio.Queue()
        self._number = 0

    @classmethod
    @asynccontextmanager
    async def over_bridge(
        cls,
        url: str,
        token: RenewableToken | str,
        *,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> AsyncIterator["LineClient"]:
        """Hold the client's end of a bridge to the MCP at ``url``."""
        client = cls(LogLines())
        http = RelayHttp(
            url, token if isinstance(token, RenewableToken) else RenewableToken(token), client_context()
        )
        bridge = Bridge(
            Conversation(http),
            client._take,
            make_logger("relay", client.log),
            sleep=sleep,
            monotonic=monotonic,
            chance=lambda: 0.0,
        )
        client.ended = asyncio.create_task(bridge.run(client._chunks()))
        try:
            yield client
            client.end()
            await client.until_ended()
        finally:
            bridge.stop()
            await asyncio.wait([client.ended])
            await http.close()

    async def until_ended(self) -> None:
        assert self.ended is not None
        await asyncio.wait_for(asyncio.shield(self.ended), BOUND_S)

    def end(self) -> None:
        self._input.put_nowait(None)

    def write(self, raw: bytes) -> None:
        self._input.put_nowait(raw)

    def say(self, message: Mapping[str, Any]) -> None:
        self.write(json.dumps({"jsonrpc": "2.0", **message}).encode() + b"\n")

    def request(self, method: str, era: str = NEW, **params: Any) -> int:
        self._number += 1
        self.say(
            {"id": self._number, "method": method, "params": params | ({"_meta": META} if era == NEW else {})}
        )
        return self._number

    async def next(self) -> dict[str, Any]:
        line = await asyncio.wait_for(self._came.get(), BOUND_S)
        value: dict[str, Any] = json.loads(line)
        return value

    async def answer(self, request: int) -> dict[str, Any]:
        """Return the next message, which answers ``request``."""
        message = await self.next()
        assert message["id"] == request, message
        return message

    async def ask(self, method: str, era: str = NEW, **params: Any) -> dict[str, Any]:
        return await self.answer(self.request(method, era, **params))

    async def open(self, era: str) -> None:
        """Begin as a client of ``era`` does."""
        if era == NEW:
            assert "result" in await self.ask("server/discover")
            return
        opening = {"protocolVersion": OLD, "capabilities": {}, "clientInfo": ME}
        assert "result" in await self.ask("initialize", OLD, **opening)
        self.say({"method": "notifications/initialized"})

    async def _chunks(self) -> AsyncIterator[bytes]:
        while (chunk := await self._input.get()) is not None:
            yield chunk

    async def _take(self, line: bytes) -> None:
        assert b"\n" not in line
        assert isinstance(json.loads(line), dict)
        self.lines.append(line)
        self._came.put_nowait(line)
