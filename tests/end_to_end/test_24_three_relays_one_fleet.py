"""24. Three relays share one fleet, with a node behind each.

Steps: each relay lists all nodes and calls each of them · agents of two follow the node of the other · one
is killed under load: no call of a node elsewhere fails, and each call of its node ends in time · its node
connects to another relay, and is called there · the servers that join them stop: each relay serves its own
node, and says so · a node is revoked at another relay than its own meanwhile · they are back, and the node is
out.
"""

import asyncio
import json
import os
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from mcp.client.client import Client

from relay.broker.nats_server import find_nats_server
from relay.cli.demo.local_system import (
    SERVER,
    LocalSystem,
    fleet_command,
    start_cluster_server,
    start_more_relays,
    start_system,
    until_listed,
)
from relay.cli.demo.processes import Processes
from relay.pki.authority import CertificateAuthority
from relay.settings.environment import now_ms
from schemas.process.status_socket import read_status
from tests.fakes.demo import called, plan_below, until_called
from tests.fakes.polling import until

pytestmark = pytest.mark.long

BOUND_S = 60
GATEWAY_S = 5.5


@dataclass
class Story:
    """The three relays, as agents of each reach them."""

    processes: Processes
    first: LocalSystem
    more: Sequence[LocalSystem]

    @property
    def systems(self) -> list[LocalSystem]:
        return [self.first, *self.more]

    @property
    def nodes(self) -> list[str]:
        return [system.real_node for system in self.systems]

    def cluster_of(self, system: LocalSystem) -> tuple[bool, bool]:
        """Return whether a relay is ready, and whether it is connected to the others."""
        status = read_status(system.plan.state.root)
        return status["ready"], status["subsystems"]["cluster"]["ready"]


@pytest.fixture
async def story(tmp_path: Path) -> AsyncIterator[Story]:
    async with Processes.running(tmp_path) as processes, asyncio.timeout(2 * BOUND_S):
        plan = await start_cluster_server(plan_below(tmp_path), processes)
        first = await start_system(plan, 0, processes, print)
        more = await start_more_relays(plan, 2, processes, print)
        yield Story(processes, first, more)


async def follow(client: Client, node_id: str, count: int) -> list[int]:
    """Follow the node by a call that stays open, and return the node's times of ``count`` samples."""
    times: asyncio.Queue[int] = asyncio.Queue()

    async def noted(progress: float, total: float | None, message: str | None) -> None:  # noqa: ARG001 - by name
        sample = json.loads(message or "null")
        assert sample["node_id"] == node_id
        times.put_nowait(sample["ts_ms"])

    tool = f"sys.{node_id}.sysmetrics.subscribe"
    call = asyncio.create_task(
        client.call_tool(tool, {"interval_ms": 1000, "include": ["load"]}, progress_callback=noted)
    )
    try:
        return [await times.get() for _ in range(count)]
    finally:
        call.cancel()
        await asyncio.wait([call])


async def load(client: Client, node_id: str, ended: list[tuple[str, float]]) -> None:
    """Call the node until cancelled, and note how each call has ended and how long it took."""
    while True:
        began = time.monotonic()
        code = await called(client, node_id)
        ended.append((code, time.monotonic() - began))
        await asyncio.sleep(0.15)  # the pace of the calls: a node announces ten a second


async def test_three_relays_are_one_fleet_also_when_one_of_them_is_killed(story: Story) -> None:
    async with AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(system.client()) for system in story.systems]
        for client in clients:
            async with asyncio.timeout(BOUND_S):
                await until_listed(client, set(story.nodes), story.processes.check)
            for node_id in story.nodes:
                assert await called(client, node_id) == "ok"
        assert [story.cluster_of(system) for system in story.systems] == [(True, True)] * 3

        # The node of the second is followed at the first and at the third, and samples once for both.
        followed = story.nodes[1]
        seen, elsewhere = await asyncio.gather(*(follow(clients[at], followed, 5) for at in (0, 2)))
        assert seen == sorted(set(seen))
        assert len(set(seen[2:]) & set(elsewhere)) >= 2

        # The third relay is killed while its node, and that of the second, are called through the first.
        agent, (_, second, third) = clients[0], story.nodes
        to_second: list[tuple[str, float]] = []
        to_third: list[tuple[str, float]] = []
        async with asyncio.TaskGroup() as tasks:
            loads = [
                tasks.create_task(load(agent, node_id, ended))
                for node_id, ended in ((second, to_second), (third, to_third))
            ]
            await until(lambda: len(to_third) >= 3)
            await story.processes.kill(story.more[1].relay)
            await until(lambda: "E_NODE_OFFLINE" in {code for code, _ in to_third})
            for task in loads:
                task.cancel()
        assert {code for code, _ in to_second} == {"ok"}
        assert {code for code, _ in to_third} <= {"ok", "E_NODE_OFFLINE", "E_DEADLINE_EXCEEDED"}
        assert all(took_s < GATEWAY_S for _, took_s in to_third)
        status = read_status(story.first.plan.state.root)
        assert status["subsystems"]["cluster"]["ready"]

        # Its node connects to the second relay, and is called through the first again.
        await story.processes.stop(story.more[1].fleet)
        moved = replace(story.more[1].plan, relay_port=story.more[0].plan.relay_port)
        await story.processes.start("moved", fleet_command(moved))
        await until_called(agent, third, "ok")

        # The servers that join them stop: each serves its own node, and says so.
        await story.processes.stop(SERVER)
        await until_called(agent, second, "E_NODE_OFFLINE")
        assert await called(agent, story.nodes[0]) == "ok"
        assert await called(clients[1], second) == "ok"
        assert story.cluster_of(story.first) == (True, False)
        program, config = (
            await asyncio.to_thread(find_nats_server),
            story.first.plan.directory / "cluster.conf",
        )
        ca = CertificateAuthority(story.first.plan.state.ca, now_ms, os.urandom)
        (kid,) = await asyncio.to_thread(ca.revoke, second)
        assert await called(clients[1], second) == "ok"
        await story.processes.start(SERVER, [str(program), "-c", str(config)])
        await until_called(clients[1], story.nodes[0], "ok")
        await until_called(clients[1], second, "E_ATTESTATION_FAILED")
        assert kid in (story.more[0].plan.state.ca / "ledger.jsonl").read_text("ascii")
