"""A kubelet and a relay of neighbouring versions work together, and each can be upgraded first.

Enrolment, manifests, heartbeats, calls and telemetry, over TLS with the relay's own CA, in both combinations;
then both in place, in the order that docs/protocol.md prescribes.
"""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from relay.cli.demo.processes import Processes
from schemas.addresses import BrokerAddress
from tests.compatibility.site import Programs, Site

# One kind of broker: both versions speak the same MQTT to it.
pytestmark = [pytest.mark.long, pytest.mark.parametrize("broker_kind", ["nats-server"])]


@pytest.fixture
async def site(tmp_path: Path, broker: BrokerAddress) -> AsyncIterator[Site]:
    async with Processes.running(tmp_path) as processes:
        yield Site(tmp_path, broker, processes)


@pytest.mark.parametrize(("of_relay", "of_node"), [("current", "previous"), ("previous", "current")])
async def test_both_combinations_work(
    site: Site, of_relay: str, of_node: str, request: pytest.FixtureRequest
) -> None:
    relay, node = request.getfixturevalue(of_relay), request.getfixturevalue(of_node)
    await site.relay(relay, "ca", "init")
    await site.start_relay(relay)
    node_id = await site.enroll(relay, node)
    await site.start_node(node)
    async with site.agent(relay) as agent:
        await agent.uses(node_id)


async def test_the_relay_is_upgraded_in_place_and_then_its_node(
    site: Site, previous: Programs, current: Programs
) -> None:
    await site.relay(previous, "ca", "init")
    await site.start_relay(previous)
    node_id = await site.enroll(previous, previous)
    await site.start_node(previous)
    async with site.agent(previous) as agent:
        await agent.uses(node_id)

    await site.processes.stop("relay")
    await site.start_relay(current)
    async with site.agent(current) as agent:
        await agent.uses(node_id)

    await site.processes.stop("node")
    await site.start_node(current)
    async with site.agent(current) as agent:
        await agent.uses(node_id)
