"""14. An agent sees one tool for each kind, finds a node by its label, and asks many at once.

Steps: the operator labels and tags the nodes · the agent lists the kinds view in each era · it finds the
node, reads it by its label, asks all nodes · a narrowed URL shows and admits no other node · the tools of the
other view still work.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest
from mcp.client.client import Client
from mcp.client.streamable_http import streamable_http_client

from relay.demo.local_system import LocalSystem
from schemas.addresses import mcp_url
from tests.fakes.demo import TIMEOUT, error_of, local_system, relay_output

BOUND_S = 60
MOCKS = 2
ERAS = ("2026-07-28", "legacy")


@pytest.fixture
async def system(tmp_path: Path) -> AsyncIterator[LocalSystem]:
    async with local_system(tmp_path, MOCKS) as started:
        yield started


@asynccontextmanager
async def agent(system: LocalSystem, era: str, query: str) -> AsyncIterator[Client]:
    headers = {"Authorization": f"Bearer {system.token}"}
    async with httpx2.AsyncClient(headers=headers, timeout=TIMEOUT) as http:
        url = mcp_url(system.plan.public_url) + query
        async with Client(streamable_http_client(url, http_client=http), mode=era) as client:
            yield client


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


async def test_an_agent_uses_a_fleet_by_kinds_and_names(system: LocalSystem) -> None:
    real, mocks = system.real_node, system.mock_nodes
    await relay_output(system, "node", "label", real, "greenhouse pi")
    await relay_output(system, "node", "tag", real, "site=north")
    for number, mock in enumerate(mocks):
        await relay_output(system, "node", "tag", mock, "site=south", "gateway")
        # Last: what is found by its label has its tags too.
        await relay_output(system, "node", "label", mock, f"barn {number}")
    for era in ERAS:
        async with asyncio.timeout(BOUND_S), agent(system, era, "?view=kinds") as client:
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

            await until_found(client, f"barn {MOCKS - 1}")
            several = await content(client, "sysecho.invoke", {"message": "hello", "nodes": ["*"]})
            assert (several["asked"], several["answered"], several["failed"]) == (1 + MOCKS, 1 + MOCKS, 0)
            assert {entry["result"]["node_id"] for entry in several["results"]} == {real, *mocks}
            south = await content(client, "sys-snapshot", {"nodes": ["site=south"], "include": ["mem"]})
            assert {entry["label"] for entry in south["results"]} == {f"barn {n}" for n in range(MOCKS)}

            misspelt = error_of(await client.call_tool("sys.snapshot", {"node": "greenhose pi"}))
            assert "greenhouse pi" in misspelt["suggested_fix"]
            by_tool = await content(client, f"sysecho.{real}.echo.invoke", {"message": "still here"})
            assert by_tool["message"] == "still here"

        narrowed = "?view=tools&tags=site%3Dnorth&kinds=sysecho"
        async with asyncio.timeout(BOUND_S), agent(system, era, narrowed) as client:
            assert await names(client) == [f"sysecho.{real}.echo.invoke"]
            outside = await client.call_tool(f"sysecho.{mocks[0]}.echo.invoke", {"message": "hello"})
            assert error_of(outside)["code"] == "E_SAFETY_DENIED"
