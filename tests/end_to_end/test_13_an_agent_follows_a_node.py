"""13. An agent follows what a node measures, in each era and each way; another program reads the broker.

Steps: call subscribe · read the samples on the broker · be notified of the resource, and read it with its
history · call with a progress token, and get each sample · stop, each in its own way: the node stops too.
"""

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from relay.cli.demo.local_system import LocalSystem, start_beside_broker
from relay.cli.demo.processes import Processes
from schemas.addresses import BrokerAddress
from tests.fakes.agents import MEMBERS, SECOND, FollowingAgent, checked
from tests.fakes.demo import error_of, plan_below
from tests.fakes.mqtt_listener import MqttListener

BOUND_S = 60


@pytest.fixture
async def system(broker: BrokerAddress, tmp_path: Path) -> AsyncIterator[LocalSystem]:
    async with Processes.running(tmp_path) as processes:
        plan = replace(plan_below(tmp_path), broker_port=broker.port)
        started = await start_beside_broker(plan, 1, processes, lambda _text: None)
        async with asyncio.timeout(BOUND_S):
            await started.until_listed()
        yield started


@pytest.mark.holds("RFC-0001/5.3/subscribe")
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
        FollowingAgent.connected(system, era, node) as agent,
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

        async with agent.notified() as updated:
            seen: set[int] = set()
            while len(seen) < 3:
                assert await updated() == agent.uri
                seen.add(checked(await agent.read(), node)["ts_ms"])
        await listener.until_silent()

        samples = await agent.progress(4)
        assert [number for number, _ in samples] == [1, 2, 3, 4]
        assert all(sample.keys() == MEMBERS for _, sample in samples)
        await listener.until_silent()


@pytest.mark.holds("RFC-0001/5.3/subscribe")
@pytest.mark.long
async def test_a_mock_node_is_followed_as_a_board_is(system: LocalSystem, broker: BrokerAddress) -> None:
    node = system.mock_nodes[0]
    listener = MqttListener(broker, f"$devices/{node}/telemetry")
    async with (
        asyncio.timeout(BOUND_S),
        listener.listening(),
        FollowingAgent.connected(system, "2026-07-28", node) as agent,
    ):
        await agent.call(SECOND)
        for _ in range(2):
            assert checked(json.loads((await listener.next()).payload), node).keys() == MEMBERS
