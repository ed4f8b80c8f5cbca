"""13. An agent follows what a node measures, in each era and each way; another program reads the broker.

Steps: call subscribe · read the samples on the broker · be notified of the resource, and read it with its
history · call with a progress token, and get each sample · stop, each in its own way: the node stops too.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx2
import pytest
from mcp.client.client import Client
from mcp.client.streamable_http import streamable_http_client
from mcp.shared.subscriptions import ResourceUpdated
from mcp_types import ResourceUpdatedNotification, TextResourceContents

from relay.demo.local_system import LocalSystem, start_beside_broker
from relay.demo.processes import Processes
from schemas.addresses import BrokerAddress, mcp_url
from schemas.registry import SchemaRegistry
from tests.fakes.demo import TIMEOUT, error_of, plan_below
from tests.fakes.mqtt_listener import MqttListener

BOUND_S = 60
SECOND = {"interval_ms": 1000, "include": ["mem", "load"]}
MEMBERS = {"ts_ms", "node_id", "uptime_s", "mem", "load"}

Updates = AbstractAsyncContextManager[Callable[[], Any]]
"""The context in which a client is notified of a resource; returns what waits for the next time."""


@pytest.fixture
async def system(broker: BrokerAddress, tmp_path: Path) -> AsyncIterator[LocalSystem]:
    async with Processes.running(tmp_path) as processes:
        plan = replace(plan_below(tmp_path), broker_port=broker.port)
        started = await start_beside_broker(plan, 1, processes, lambda _text: None)
        async with asyncio.timeout(BOUND_S):
            await started.until_listed()
        yield started


def checked(sample: Any, node: str) -> dict[str, Any]:
    """Return the sample after checking that it is one of ``node``."""
    SchemaRegistry().load("system.metrics.sample@1.0.0").check(sample)
    assert sample["node_id"] == node
    return dict(sample)


class Agent:
    """One client, and the node that it follows."""

    def __init__(self, client: Client, node: str, updated: asyncio.Queue[str]) -> None:
        self._client = client
        self._node = node
        self._updated = updated
        self.tool = f"sys.{node}.sysmetrics.subscribe"
        self.uri = f"node://{node}/telemetry"

    @classmethod
    @asynccontextmanager
    async def connected(cls, system: LocalSystem, era: str, node: str) -> AsyncIterator["Agent"]:
        updated: asyncio.Queue[str] = asyncio.Queue()

        async def noted(message: Any) -> None:
            if isinstance(message, ResourceUpdatedNotification):
                updated.put_nowait(str(message.params.uri))

        headers = {"Authorization": f"Bearer {system.token}"}
        async with httpx2.AsyncClient(headers=headers, timeout=TIMEOUT) as http:
            transport = streamable_http_client(mcp_url(system.plan.public_url), http_client=http)
            async with Client(transport, mode=era, message_handler=noted) as client:
                yield cls(client, node, updated)

    async def call(self, arguments: dict[str, Any], **options: Any) -> Any:
        return await self._client.call_tool(self.tool, arguments, **options)

    async def read(self, query: str = "") -> Any:
        [content] = (await self._client.read_resource(self.uri + query, cache_mode="bypass")).contents
        assert isinstance(content, TextResourceContents)
        return json.loads(content.text)

    @asynccontextmanager
    async def subscribed(self) -> AsyncIterator[Callable[[], Any]]:
        """Follow the resource as the old era does."""
        await self._client.session.subscribe_resource(self.uri)
        yield self._updated.get
        await self._client.session.unsubscribe_resource(self.uri)

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[Callable[[], Any]]:
        """Follow the resource as the new era does."""
        async with self._client.listen(resource_subscriptions=[self.uri]) as events:

            async def following() -> str:
                event = await anext(aiter(events))
                assert isinstance(event, ResourceUpdated)
                return event.uri

            yield following


async def until_silent(listener: MqttListener) -> None:
    """Wait until nothing has been published for more than an interval."""
    silent = False
    while not silent:
        try:
            async with asyncio.timeout(2.5):
                await listener.next()
        except TimeoutError:
            silent = True


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:resources/:mcp.shared.exceptions.MCPDeprecationWarning")
@pytest.mark.parametrize("era", ["2026-07-28", "legacy"])
async def test_a_node_is_followed_until_its_agent_stops(
    system: LocalSystem, broker: BrokerAddress, era: str
) -> None:
    node = system.real_node
    listener = MqttListener(broker, f"$devices/{node}/telemetry")
    async with (
        asyncio.timeout(BOUND_S),
        listener.listening(),
        Agent.connected(system, era, node) as agent,
    ):
        assert error_of(await agent.call({}))["code"] == "E_MANIFEST_INVALID"  # no interval, no stream
        assert checked((await agent.call(SECOND)).structured_content, node).keys() == MEMBERS

        messages = [await listener.next() for _ in range(3)]
        assert {(message.retained, message.qos) for message in messages} == {(False, 0)}
        times = [checked(json.loads(message.payload), node)["ts_ms"] for message in messages]
        assert times == sorted(set(times))
        history = await agent.read("?since_ms=0")
        assert len(history["samples"]) >= 3
        assert history["lost"] == 0

        following: Updates = agent.subscribed() if era == "legacy" else agent.listening()
        async with following as updated:
            seen: set[int] = set()
            while len(seen) < 3:
                assert await updated() == agent.uri
                seen.add(checked(await agent.read(), node)["ts_ms"])
        await until_silent(listener)

        received: asyncio.Queue[tuple[float, Any]] = asyncio.Queue()

        async def progress(number: float, _total: float | None, message: str | None) -> None:
            received.put_nowait((number, json.loads(message or "null")))

        call = asyncio.create_task(agent.call(SECOND, progress_callback=progress))
        samples = [await received.get() for _ in range(4)]
        assert [number for number, _ in samples] == [1, 2, 3, 4]
        assert all(checked(sample, node).keys() == MEMBERS for _, sample in samples)
        assert not call.done()
        call.cancel()
        await until_silent(listener)


async def test_a_mock_node_is_followed_as_a_board_is(system: LocalSystem, broker: BrokerAddress) -> None:
    node = system.mock_nodes[0]
    listener = MqttListener(broker, f"$devices/{node}/telemetry")
    async with (
        asyncio.timeout(BOUND_S),
        listener.listening(),
        Agent.connected(system, "2026-07-28", node) as agent,
    ):
        await agent.call(SECOND)
        for _ in range(2):
            assert checked(json.loads((await listener.next()).payload), node).keys() == MEMBERS
