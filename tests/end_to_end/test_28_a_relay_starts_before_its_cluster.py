"""28. A relay of a cluster is started while no server of NATS is there.

Steps: its own node is called, and ``/readyz`` and ``relay status`` say what is missing · the server comes up:
the relay joins, and says so.
"""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from pathlib import Path

import httpx2
import pytest

from relay.cli.demo.local_system import LocalSystem, start_system
from relay.cli.demo.processes import Processes
from tests.fakes.cluster_server import NatsServer
from tests.fakes.command_lines import CommandLines
from tests.fakes.demo import called, plan_below
from tests.fakes.polling import before_asking_again

BOUND_S = 90
APART = "not connected; only this relay's own nodes can be called"


@dataclass
class Story:
    system: LocalSystem
    nats: NatsServer
    commands: CommandLines

    async def until_cluster(self, *, ready: bool) -> str:
        """Return what ``/readyz`` says of the cluster once it is as wanted; the relay itself is ready."""
        async with httpx2.AsyncClient(trust_env=False) as http:
            while True:
                page = (await http.get(f"{self.system.plan.url}/readyz")).json()
                cluster = page["subsystems"]["cluster"]
                if cluster["ready"] is ready:
                    assert page["ready"]
                    return str(cluster["state"])
                await before_asking_again()

    async def status(self) -> str:
        """Return what ``relay status`` prints of the cluster."""
        state = str(self.system.plan.state.root)
        done = await asyncio.to_thread(self.commands.run, "relay", "status", "--state-dir", state)
        assert done.code == 0, done.err
        (line,) = [line for line in done.out.splitlines() if line.startswith("cluster ")]
        return line.removeprefix("cluster").strip()

    async def call(self) -> None:
        """Call the relay's own node."""
        async with self.system.client() as client:
            assert await called(client, self.system.real_node) == "ok"


@pytest.fixture
async def story(tmp_path: Path, commands: CommandLines) -> AsyncIterator[Story]:
    directory = tmp_path / "nats"
    directory.mkdir()
    nats = NatsServer(directory)
    options = ("--cluster", nats.url, "--cluster-credentials", str(nats.credentials))
    plan = replace(plan_below(tmp_path), relay_options=options)
    async with Processes.running(tmp_path) as processes:
        try:
            system = await start_system(plan, 0, processes, lambda _text: None)
            yield Story(system, nats, commands)
        finally:
            nats.stop()


async def test_it_serves_its_own_nodes_says_so_and_joins_once_the_server_is_up(story: Story) -> None:
    async with asyncio.timeout(BOUND_S):
        await story.system.until_listed()
        await story.call()
        assert (await story.until_cluster(ready=False)).startswith(APART)
        assert (await story.status()).startswith(APART)

        await asyncio.to_thread(story.nats.start)
        joined = await story.until_cluster(ready=True)
        assert joined.startswith(f"connected to {story.nats.url}: 1 relay, ")
        assert (await story.status()).startswith(f"connected to {story.nats.url}")
        await story.call()
