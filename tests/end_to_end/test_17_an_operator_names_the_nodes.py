"""17. An operator says what a board is called, and an agent finds it by that.

Steps: `relay node label` while an agent of each protocol era listens · the titles of the node's tools, its
resources and the instructions have the name · start the relay again: they have it still.
"""

import asyncio
import json
from contextlib import suppress

import pytest
from mcp.client.client import Client
from mcp.client.subscriptions import ToolsListChanged
from mcp_types import TextResourceContents

from relay.cli.demo.local_system import TENANT, LocalSystem, list_tools, until_listed
from tests.fakes.command_lines import CommandLines
from tests.fakes.demo import Demo, relay_output, restart_relay

BOUND_S = 60
AGAIN_S = 2


async def titles(client: Client, node_id: str) -> set[str]:
    return {str(tool.title) for tool in await list_tools(client) if node_id in tool.name}


async def manifest_of(client: Client, reference: str) -> str:
    (content,) = (await client.read_resource(f"node://{reference}/manifest")).contents
    assert isinstance(content, TextResourceContents)
    return str(json.loads(content.text)["node_id"])


async def test_a_label_reaches_agents_of_both_eras(demo: Demo, commands: CommandLines) -> None:
    (node, _), other = demo.mock_nodes, demo.real_node
    state = ("--state-dir", str(demo.state("relay")))
    old_era_heard = asyncio.Event()

    async def heard(message: object) -> None:
        if "list_changed" in str(getattr(message, "method", "")):
            old_era_heard.set()

    async with asyncio.timeout(BOUND_S):
        async with (
            demo.client() as client,
            client.listen(tools_list_changed=True) as changes,
            demo.client("legacy", message_handler=heard),
        ):
            # The older era's stream may open after a change, which is not repeated there.
            while not old_era_heard.is_set():
                for label in ("loft pi", "attic pi"):
                    assert commands.run("relay", "node", "label", node, label, *state).code == 0
                with suppress(TimeoutError):
                    await asyncio.wait_for(old_era_heard.wait(), AGAIN_S)
            assert isinstance(await anext(changes), ToolsListChanged)
            # That may have been the label of another test.
            while not any("attic" in title for title in await titles(client, node)):
                await anext(changes)
            assert await titles(client, node) >= {"attic pi: CPU, memory, disks", "attic pi: Echo"}
            assert not any("attic" in title for title in await titles(client, other))
            assert await manifest_of(client, "attic%20pi") == node
        async with demo.client() as client:
            assert '"attic pi"' in (client.instructions or "")
    shown = commands.run("relay", "node", "show", "Attic Pi", "--json", *state)
    assert (shown.code, shown.err) == (0, "")
    facts = json.loads(shown.out)
    assert (facts["node_id"], facts["label"]) == (node, "attic pi")


@pytest.mark.long
async def test_a_label_is_there_after_a_restart(system: LocalSystem) -> None:
    node, (other,) = system.real_node, system.mock_nodes
    async with asyncio.timeout(BOUND_S):
        async with system.client() as client, client.listen(tools_list_changed=True) as changes:
            assert await titles(client, node) >= {"CPU, memory, disks", "Echo"}
            await relay_output(system, "node", "label", node, "greenhouse pi")
            assert isinstance(await anext(changes), ToolsListChanged)
            assert "greenhouse pi: CPU, memory, disks" in await titles(client, node)

        await restart_relay(system)
        async with system.client() as client:
            await until_listed(client, {node, other}, system.processes.check)
            assert "greenhouse pi: Echo" in await titles(client, node)
        where = ("--public-url", system.plan.public_url, "--tenant", TENANT)
        listed = await relay_output(system, "fleet", "nodes", *where)
        assert any(line.startswith("greenhouse pi") for line in listed.splitlines())
