"""A relay's side of MCP on a real server, with one node that answers as the test scripts it."""

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.fakes.hub import Hub
from tests.fakes.mcp_stage import Stage
from tests.fakes.routers import ScriptedRouter
from tests.fakes.serving import Server
from tests.fakes.signer import NODE_ID, SimulatedNode


@pytest.fixture
def node(hub: Hub) -> SimulatedNode:
    node = hub.ca.issue()
    hub.connect(node)
    return node


@pytest_asyncio.fixture(loop_scope="module")
async def stage(
    hub: Hub, node: SimulatedNode, router: ScriptedRouter, server: Server
) -> AsyncIterator[Stage]:
    assert node.node_id == NODE_ID
    async with Stage(hub, router, server).running() as stage:
        yield stage
