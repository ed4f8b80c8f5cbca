"""31. An operator has two relays seal what they say to each other, and shuts one of them out.

Steps: each relay calls the node of the other · `relay cluster seal` · the same, and each has a line in the
audit of the relay with the node, under the name of the one that has asked · `relay ca revoke --relay` · the
one that is revoked calls no node of the other, nor is its own called.
"""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from relay.cli.demo.local_system import (
    LocalSystem,
    start_cluster_server,
    start_more_relays,
    start_system,
    until_listed,
)
from relay.cli.demo.processes import Processes
from schemas.process.status_socket import read_status
from tests.fakes.demo import called, plan_below, relay_output, until_called
from tests.fakes.polling import until

pytestmark = pytest.mark.long

BOUND_S = 60
AWAY = {"E_NODE_OFFLINE", "E_DEADLINE_EXCEEDED"}


@dataclass
class Story:
    """The relay with the CA's key, and another."""

    processes: Processes
    first: LocalSystem
    other: LocalSystem

    @property
    def systems(self) -> tuple[LocalSystem, LocalSystem]:
        return self.first, self.other


@pytest.fixture
async def story(tmp_path: Path) -> AsyncIterator[Story]:
    async with Processes.running(tmp_path) as processes, asyncio.timeout(2 * BOUND_S):
        plan = await start_cluster_server(plan_below(tmp_path), processes)
        first = await start_system(plan, 0, processes, print)
        (other,) = await start_more_relays(plan, 1, processes, print)
        yield Story(processes, first, other)


def cluster_of(system: LocalSystem) -> dict[str, Any]:
    """Return what a relay says of its fleet."""
    status = read_status(system.plan.state.root)
    return {**status["cluster"], "ready": status["subsystems"]["cluster"]["ready"]}


def asked_by(system: LocalSystem) -> list[str]:
    """Return which relays have had a command run at that one."""
    lines = map(json.loads, system.plan.state.audit.read_text("utf-8").splitlines())
    return [line["relay"] for line in lines if line.get("event") == "command_of_another_relay"]


async def test_a_fleet_is_sealed_and_a_relay_of_it_shut_out(story: Story) -> None:
    async with AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(system.client()) for system in story.systems]
        nodes = {system.real_node for system in story.systems}
        for client in clients:
            async with asyncio.timeout(BOUND_S):
                await until_listed(client, nodes, story.processes.check)
        ways = ((clients[0], story.other), (clients[1], story.first))
        for client, system in ways:
            assert await called(client, system.real_node) == "ok"
        await until(lambda: all(other["name"] for other in cluster_of(story.first)["others"]), BOUND_S)
        names = [cluster_of(system)["name"] for system in story.systems]

        await relay_output(story.first, "cluster", "seal", "--yes")
        await until(
            lambda: all(
                (said := cluster_of(system))["sealed"] and said["ready"] and said["others"]
                for system in story.systems
            ),
            BOUND_S,
        )
        for client, system in ways:
            await until_called(client, system.real_node, "ok")
        assert names[0] in asked_by(story.other)
        assert names[1] in asked_by(story.first)

        revoked = await relay_output(story.first, "ca", "revoke", "--relay", names[1])
        assert revoked.split()
        for client, system in ways:
            await until_called(client, system.real_node, *AWAY)
        asked = len(asked_by(story.first))
        assert await called(clients[1], story.first.real_node) in AWAY
        assert len(asked_by(story.first)) == asked
