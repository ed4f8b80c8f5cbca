"""A kubelet and a relay of neighbouring versions work together, and each can be upgraded first.

Enrolment, manifests, heartbeats, calls and telemetry, over TLS with the relay's own CA, in both combinations;
then both in place, in the order that docs/protocol.md prescribes.
"""

import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from relay.cli.demo.processes import Processes
from relay.state.labels import kept_form
from schemas.addresses import BrokerAddress
from tests.compatibility.site import Programs, Site

LABEL = "Gewächshaus ปั๊มน้ำ"
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


async def test_a_relay_of_the_previous_version_shows_and_finds_a_label_in_the_form_that_is_kept(
    site: Site, previous: Programs, current: Programs
) -> None:
    await site.relay(previous, "ca", "init")
    await site.start_relay(previous)
    node_id = await site.enroll(previous, previous)
    # The line that the ledger has after a downgrade; a relay of this version sends the same to others.
    await site.relay(current, "node", "label", node_id, LABEL)
    await site.start_node(previous)
    async with site.agent(previous) as agent:
        await agent.until_listed(node_id)
        assert await agent.title(node_id) == f"{kept_form(LABEL)}: Echo"
    (listed,) = json.loads(await site.relay(previous, "node", "list", "--json"))
    assert (listed["node_id"], listed["label"]) == (node_id, kept_form(LABEL))
    # What it writes back is the same label to this version.
    await site.relay(previous, "node", "tag", kept_form(LABEL), "site=north")
    (again,) = json.loads(await site.relay(current, "node", "list", "--json"))
    assert (again["label"], again["tags"]) == (LABEL, ["site=north"])


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
