"""17. An operator says what a board is called, and an agent finds it by that.

Steps: `relay node label` while an agent of each protocol era listens · the titles of the node's tools, its
resources and the instructions have the name · start the relay again: they have it still.
"""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx2
import pytest
from mcp.client.client import Client
from mcp.client.session import MessageHandlerFnT
from mcp.client.streamable_http import streamable_http_client
from mcp.client.subscriptions import ToolsListChanged
from mcp_types import TextResourceContents

from relay.demo.local_system import TENANT, LocalSystem, list_tools, relay_command, until_listed
from schemas.addresses import mcp_url
from tests.fakes.demo import local_system, relay_output

BOUND_S = 60


@pytest.fixture
async def system(tmp_path: Path) -> AsyncIterator[LocalSystem]:
    async with local_system(tmp_path, 1) as started:
        yield started


@asynccontextmanager
async def old_client(system: LocalSystem, heard: MessageHandlerFnT) -> AsyncIterator[Client]:
    """Hold a client of the old era that passes what it is sent to ``heard``."""
    headers = {"Authorization": f"Bearer {system.token}"}
    async with httpx2.AsyncClient(headers=headers, trust_env=False) as http:
        transport = streamable_http_client(mcp_url(system.plan.public_url), http_client=http)
        async with Client(transport, mode="legacy", message_handler=heard) as client:
            yield client


async def titles(client: Client, node_id: str) -> set[str | None]:
    return {tool.title for tool in await list_tools(client) if node_id in tool.name}


async def manifest_of(client: Client, reference: str) -> str:
    (content,) = (await client.read_resource(f"node://{reference}/manifest")).contents
    assert isinstance(content, TextResourceContents)
    return str(json.loads(content.text)["node_id"])


async def test_a_label_reaches_agents_of_both_eras_and_is_there_after_a_restart(system: LocalSystem) -> None:
    node, (other,) = system.real_node, system.mock_nodes
    old_era_heard = asyncio.Event()

    async def heard(message: object) -> None:
        if "list_changed" in str(getattr(message, "method", "")):
            old_era_heard.set()

    async with asyncio.timeout(BOUND_S):
        async with (
            system.client() as client,
            client.listen(tools_list_changed=True) as changes,
            old_client(system, heard),
        ):
            assert await titles(client, node) >= {"CPU, memory, disks", "Echo"}
            await relay_output(system, "node", "label", node, "greenhouse pi")
            assert isinstance(await anext(changes), ToolsListChanged)
            await old_era_heard.wait()
            assert "greenhouse pi: CPU, memory, disks" in await titles(client, node)
            assert not any("greenhouse" in str(title) for title in await titles(client, other))
            assert await manifest_of(client, "greenhouse%20pi") == node
        async with system.client() as client:
            assert '"greenhouse pi"' in (client.instructions or "")
        shown = json.loads(await relay_output(system, "node", "show", "Greenhouse Pi", "--json"))
        assert (shown["node_id"], shown["label"]) == (node, "greenhouse pi")

        await system.processes.kill("relay")
        await system.processes.start("relay", relay_command(system.plan))
        await system.processes.until_listening(system.plan.relay_port)
        async with system.client() as client:
            await until_listed(client, {node, other}, system.processes.check)
            assert "greenhouse pi: Echo" in await titles(client, node)
        where = ("--public-url", system.plan.public_url, "--tenant", TENANT)
        listed = await relay_output(system, "fleet", "nodes", *where)
        assert any(line.startswith("greenhouse pi") for line in listed.splitlines())
