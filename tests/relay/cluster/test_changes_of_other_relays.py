"""The clients of a relay hear of the nodes of another one: as they come, change and go."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, suppress
from pathlib import Path

import pytest

from relay.auth.permissions import Rights
from relay.fleet.change_notifier import ChangeNotifier
from relay.fleet.fleet import GRACE_MS
from relay.mcp_api.resources import FleetResources
from schemas.registry import SchemaRegistry
from tests.fakes.caller_stage import CallerStage
from tests.fakes.cluster_server import NatsServer
from tests.fakes.joined_hub import JoinedHub
from tests.fakes.polling import until
from tests.fakes.signer import ECHO, METRICS, TENANT, SimulatedCa, SimulatedNode, key_named

pytestmark = pytest.mark.integration

READERS = Rights(TENANT, frozenset({"read_only"}))


class Client:
    """A client of ``hub``, which lists the tools whenever it hears that they have changed."""

    def __init__(self, hub: JoinedHub, notifier: ChangeNotifier) -> None:
        self._hub = hub
        self._lists: asyncio.Queue[set[str]] = asyncio.Queue()
        notifier.listen(READERS, self._changed)

    async def until_listed(self, capabilities: set[str]) -> None:
        """Wait until it has heard of a list with tools of exactly these capabilities."""
        async with asyncio.timeout(10):
            while await self._lists.get() != capabilities:
                pass

    async def _changed(self) -> None:
        self._lists.put_nowait({tool.cap_id for tool in self._hub.fleet.selected.listed(READERS)})


@pytest.fixture
async def hubs(
    nats: NatsServer, tmp_path: Path, registry: SchemaRegistry
) -> AsyncIterator[tuple[JoinedHub, JoinedHub]]:
    ca = SimulatedCa()
    async with AsyncExitStack() as stack:
        here, there = [
            await stack.enter_async_context(JoinedHub.joined(nats.config, tmp_path / name, registry, ca))
            for name in ("here", "there")
        ]
        yield here, there


async def test_the_list_of_nodes_has_the_relay_that_each_is_connected_to(
    hubs: tuple[JoinedHub, JoinedHub],
) -> None:
    here, there = hubs
    node = there.ca.issue()
    here.announce(node, capabilities=[ECHO])
    resources = FleetResources(here.fleet, here.part.peers.relay_of)

    def relay() -> str | None:
        (shown,) = json.loads(resources.read(TENANT, "nodes", "") or "")["nodes"]
        found: str | None = shown["relay"]
        return found

    stage = CallerStage(there, there.ulids.new(), node)
    await until(lambda: relay() == there.part.peers.relay)
    stage.lose()
    await until(lambda: relay() is None)
    CallerStage(here, here.ulids.new(), node)
    await until(lambda: relay() == here.part.peers.relay)


async def test_a_client_hears_of_a_node_of_another_relay_that_comes_changes_and_goes(
    hubs: tuple[JoinedHub, JoinedHub],
) -> None:
    here, there = hubs
    here.clock.advance(GRACE_MS)
    notifier = ChangeNotifier(here.fleet, here.log, interval_s=0)
    running = asyncio.create_task(notifier.run())
    client = Client(here, notifier)
    node = there.ca.issue()
    here.announce(node, capabilities=[ECHO])
    assert here.fleet.selected.listed(READERS) == []  # it is connected nowhere
    stage = CallerStage(there, there.ulids.new(), node)
    await client.until_listed({"echo"})
    here.announce(node, capabilities=[ECHO, METRICS], issued_at_ms=here.clock() + 1)
    await client.until_listed({"echo", str(METRICS["cap_id"])})
    stage.lose()
    await until(lambda: not here.part.presence.nodes_elsewhere())
    here.clock.advance(GRACE_MS)
    await client.until_listed(set())
    running.cancel()
    with suppress(asyncio.CancelledError):
        await running


async def test_what_this_relay_has_not_verified_is_not_listed_wherever_the_node_is_connected(
    hubs: tuple[JoinedHub, JoinedHub],
) -> None:
    here, there = hubs
    here.clock.advance(GRACE_MS)
    node = there.ca.issue()
    forged = SimulatedNode(node.node_id, TENANT, key_named("of no node"), node.leaf_pem, node.root_pem)
    CallerStage(there, there.ulids.new(), node)
    assert there.fleet.selected.listed(READERS)
    here.announce(forged, capabilities=[ECHO])
    await until(lambda: here.part.presence.nodes_elsewhere() == 1)  # its leaf is known, and it is connected
    assert here.fleet.selected.listed(READERS) == []
    here.announce(node, capabilities=[ECHO])
    await until(lambda: here.fleet.selected.listed(READERS))
