"""14. An agent sees one tool for each kind, finds a node by its label, and asks many at once.

Steps: the operator labels and tags the nodes · the agent lists the kinds view in each era, by query
and by path · it finds the node, reads it by its label, asks all nodes · a narrowed URL shows and admits
no other node · the tools of the other view still work.
"""

import asyncio
from typing import Any

import pytest
from mcp.client.client import Client

from tests.fakes.command_lines import CommandLines
from tests.fakes.demo import Demo, error_of

BOUND_S = 60


@pytest.fixture
def named(demo: Demo, commands: CommandLines) -> Demo:
    """The demo, once its operator has given each node a label and tags."""

    def node(verb: str, *arguments: str) -> None:
        ended = commands.run("relay", "node", verb, *arguments, "--state-dir", str(demo.state("relay")))
        assert ended.code == 0, ended

    node("label", demo.real_node, "greenhouse pi")
    node("tag", demo.real_node, "site=north")
    for number, mock in enumerate(demo.mock_nodes):
        node("tag", mock, "site=south", "gateway")
        # Last: what is found by its label has its tags too.
        node("label", mock, f"barn {number}")
    return demo


async def names(client: Client) -> list[str]:
    return [tool.name for tool in (await client.list_tools(cache_mode="bypass")).tools]


async def content(client: Client, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """Call a tool; the client checks what it answers against the schema that it was listed with."""
    result = await client.call_tool(name, arguments)
    assert result.is_error is False, result
    return dict(result.structured_content or {})


async def until_found(client: Client, label: str) -> dict[str, Any]:
    while True:
        found = await content(client, "find_nodes", {"query": label})
        if found["total"]:
            return dict(found["nodes"][0])


@pytest.mark.parametrize("era", ["2026-07-28", "legacy"])
async def test_an_agent_uses_a_fleet_by_kinds_and_names(named: Demo, era: str) -> None:
    real, mocks = named.real_node, named.mock_nodes
    async with asyncio.timeout(BOUND_S):
        async with named.client(era, "?view=kinds") as client:
            listed = await names(client)
            assert listed == sorted(listed)
            assert {"find_nodes", "sys.snapshot", "sysecho.invoke"} <= set(listed)
            assert not any(node in name for node in (real, *mocks) for name in listed)

            node = await until_found(client, "greenhouse")
            assert (node["node_id"], node["label"], node["online"]) == (real, "greenhouse pi", True)
            assert "system.metrics" in node["kinds"]
            sample = await content(client, "sys.snapshot", {"node": node["label"]})
            assert sample["node_id"] == real
            measured = (await until_found(client, real[:20]))["measured"]
            assert measured["ts_ms"] >= sample["ts_ms"]

            await until_found(client, f"barn {len(mocks) - 1}")
            several = await content(client, "sysecho.invoke", {"message": "hello", "nodes": ["*"]})
            nodes = 1 + len(mocks)
            assert (several["asked"], several["answered"], several["failed"]) == (nodes, nodes, 0)
            assert {entry["result"]["node_id"] for entry in several["results"]} == {real, *mocks}
            south = await content(client, "sys-snapshot", {"nodes": ["site=south"], "include": ["mem"]})
            assert {entry["label"] for entry in south["results"]} == {f"barn {n}" for n in range(len(mocks))}

            misspelt = error_of(await client.call_tool("sys.snapshot", {"node": "greenhose pi"}))
            assert "greenhouse pi" in misspelt["suggested_fix"]
            by_tool = await content(client, f"sysecho.{real}.echo.invoke", {"message": "still here"})
            assert by_tool["message"] == "still here"

        async with named.client(era, "/kinds") as client:
            assert {"find_nodes", "sys-snapshot", "sysecho-invoke"} <= set(await names(client))

        narrowed = "?view=tools&tags=site%3Dnorth&kinds=sysecho"
        async with named.client(era, narrowed) as client:
            assert await names(client) == [f"sysecho.{real}.echo.invoke"]
            outside = await client.call_tool(f"sysecho.{mocks[0]}.echo.invoke", {"message": "hello"})
            assert error_of(outside)["code"] == "E_SAFETY_DENIED"
