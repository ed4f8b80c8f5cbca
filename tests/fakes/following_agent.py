"""An agent that follows the telemetry of a node, on the official MCP client, in the era that a test names."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, Final

import httpx2
from mcp.client.client import Client
from mcp.client.streamable_http import streamable_http_client
from mcp.shared.subscriptions import ResourceUpdated
from mcp_types import CallToolResult, ResourceUpdatedNotification, TextResourceContents

from relay.cli.demo.local_system import LocalSystem
from schemas.addresses import mcp_url
from schemas.registry import SchemaRegistry
from schemas.times import iso
from tests.fakes.demo import TIMEOUT

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
        """Call ``subscribe``."""
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
