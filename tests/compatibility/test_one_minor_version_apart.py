"""A kubelet and a relay of neighbouring versions work together, and each can be upgraded first.

Enrolment, manifests, heartbeats, calls and telemetry, over TLS with the relay's own CA, in both combinations;
then both in place, in the order that docs/upgrade.md prescribes, while another process calls.
"""

import json
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from relay.cli.demo.processes import Processes
from schemas.addresses import BrokerAddress
from schemas.labels import kept_form
from tests.compatibility.site import Programs, Site
from tests.fakes.polling import until
from tests.fakes.steady_caller import failed_outside, first_answer

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


@pytest.mark.parametrize("of_relay", ["oldest", "previous"])
async def test_a_relay_that_does_not_know_a_kind_does_not_lose_the_node_that_has_it(
    site: Site, of_relay: str, current: Programs, request: pytest.FixtureRequest
) -> None:
    relay = request.getfixturevalue(of_relay)
    await site.relay(relay, "ca", "init")
    await site.start_relay(relay)
    node_id = await site.enroll(relay, current)
    await site.start_node(current, "--kinds", "linux.health")
    await until(lambda: site.sessions() > 0)

    def logged(event: str) -> list[dict[str, Any]]:
        lines = map(json.loads, site.processes.log("node").read_text().splitlines())
        return [line for line in lines if line["event"].startswith(event)]

    await until(lambda: logged("kinds not announced"))
    assert [line["kinds"] for line in logged("kinds not announced")] == [["linux.health"]]
    assert logged("relay rejects the manifest") == []
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


@pytest.mark.timeout(300)
async def test_relay_and_node_are_upgraded_in_place_version_by_version_while_calls_are_made(
    site: Site, oldest: Programs, previous: Programs, current: Programs
) -> None:
    await site.relay(oldest, "ca", "init")
    await site.start_relay(oldest)
    node_id = await site.enroll(oldest, oldest)
    await site.start_node(oldest)
    async with site.agent(oldest) as agent:
        await agent.uses(node_id)
    await site.start_caller(oldest, f"sys.{node_id}.sysmetrics.snapshot")

    async def called(since: float) -> float:
        await until(lambda: first_answer(site.printed(), since), 60)
        return first_answer(site.printed(), since) or since

    restarts = []
    running = oldest
    for version in (previous, current):
        for name, start in (("relay", site.start_relay), ("node", site.start_node)):
            stopped = await called(time.time())
            await site.processes.stop(name)
            await start(version)
            restarts.append((stopped, await called(time.time())))
            running = version if name == "relay" else running
            async with site.agent(running) as agent:
                await agent.uses(node_id)
    await called(time.time())
    await site.processes.stop("caller")
    assert failed_outside(site.printed(), restarts) == []
