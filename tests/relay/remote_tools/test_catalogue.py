"""The list of tools: pages, limits, and when it is made again."""

from typing import Any

import pytest

from relay.remote_tools import Reason, RemoteToolError, ToolNotFound, ToolProviderFailure
from relay.remote_tools import catalogue as module
from tests.fakes.guarded import over_http
from tests.fakes.mcp_server import OBJECT, FakeMcpServer

pytestmark = pytest.mark.integration

PING = {"message": "ping"}


@pytest.mark.parametrize("legacy", [False, True])
async def test_every_page_is_listed(legacy: bool) -> None:  # noqa: FBT001 - the era
    fake = FakeMcpServer(legacy=legacy, page_size=4)
    async with over_http(fake) as client:
        names = [contract.name for contract in await client.tools.list_tools()]
    assert names == [tool["name"] for tool in fake.tools]
    assert fake.listed == -(-len(names) // 4)


@pytest.mark.parametrize(("limit", "value"), [("MAX_TOOLS", 3), ("MAX_PAGES", 2), ("MAX_LIST_BYTES", 1000)])
async def test_a_list_without_end_is_refused(monkeypatch: pytest.MonkeyPatch, limit: str, value: int) -> None:
    monkeypatch.setattr(module, limit, value)
    async with over_http(FakeMcpServer(page_size=1)) as client:
        with pytest.raises(ToolProviderFailure) as caught:
            await client.tools.list_tools()
    assert caught.value.reason is Reason.TOO_LARGE


async def test_what_is_not_used_of_a_tool_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_LIST_BYTES", 10_000)
    fake = FakeMcpServer(page_size=1)
    rest = {"_meta": {"any": "x" * 10_000}, "icons": [{"src": "data:" + "x" * 10_000}], "any": "x" * 10_000}
    fake.tools = [{**tool, **rest} for tool in fake.tools[:3]]
    async with over_http(fake) as client:
        assert len(await client.tools.list_tools()) == 3
    fake.tools[0]["description"] = "x" * 10_000
    async with over_http(fake) as client:
        with pytest.raises(ToolProviderFailure, match="more than 10000 bytes"):
            await client.tools.list_tools()


async def test_a_name_that_is_not_known_is_looked_for_once_more() -> None:
    fake = FakeMcpServer()
    async with over_http(fake) as client:
        await client.tools.execute("echo", PING)
        with pytest.raises(ToolNotFound):
            await client.tools.execute("later", {})
        fake.tools.append({"name": "later", "inputSchema": OBJECT})
        fake.results["later"] = {"ok": True}
        assert (await client.tools.execute("later", {})).structured == {"ok": True}
        assert (await client.tools.execute("echo", PING)).structured == PING
    assert fake.listed == 4 - 1


async def test_a_name_of_more_than_256_characters_is_left_out() -> None:
    fake = FakeMcpServer()
    fake.tools.append({"name": "x" * 257, "inputSchema": OBJECT})
    async with over_http(fake) as client:
        assert len(await client.tools.list_tools()) == len(fake.tools) - 1


@pytest.mark.parametrize(
    "answer", [{"tools": "no list"}, {"tools": [{"name": 5}]}, {"tools": [{"name": "x"}]}]
)
async def test_a_list_that_is_not_valid_is_a_failure_of_the_provider(answer: Any) -> None:
    fake = FakeMcpServer(listing=answer)
    async with over_http(fake) as client:
        with pytest.raises(RemoteToolError) as caught:
            await client.tools.list_tools()
    assert (type(caught.value), caught.value.reason) == (ToolProviderFailure, Reason.PROTOCOL)
