"""A running relay's nodes and tools are read by MCP, page by page."""

import json
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from relay.cli.fleet_reader import FleetReader, FleetReadError
from relay.client.stdio_bridge.bearer_token import RenewableToken
from relay.client.stdio_bridge.http_client import NotSentError, RelayHttp
from relay.mcp_api.resources import FleetResources
from schemas.tls import client_context
from tests.fakes.hub import Hub
from tests.fakes.other_relay import OtherRelay
from tests.fakes.ports import unused_port
from tests.fakes.served_relay import ServedRelay
from tests.fakes.serving import Server

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(loop_scope="module")
async def served(hub: Hub, server: Server) -> AsyncIterator[ServedRelay]:
    async with ServedRelay.open(hub, server) as relay:
        yield relay


async def read(served: ServedRelay, what: str, token: str | None = None) -> list[str]:
    http = RelayHttp(
        f"http://{served.address}/mcp", RenewableToken(token or served.hub.token()), client_context()
    )
    try:
        found = await getattr(FleetReader(http), what)()
    finally:
        await http.close()
    return [each.get("node_id") or each["name"] for each in found]


async def test_nodes_and_tools_are_read_over_all_pages(
    served: ServedRelay, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("relay.mcp_api.resources.NODES_PER_PAGE", 2)
    monkeypatch.setattr("relay.mcp_api.tool_list.PAGE_SIZE", 3)
    ids = [f"01hzx9k3m4p7q8r9s0t1v2{number:04}" for number in range(5)]
    for node_id in ids:
        served.hub.connect(served.hub.ca.issue(node_id))
    assert await read(served, "nodes") == ids
    tools = await read(served, "tools")
    assert len(tools) == len(set(tools)) == 10
    assert await read(served, "nodes", served.hub.token(tenant="globex")) == []


@pytest.mark.parametrize(("relays", "pages"), [(1, 1), (2, 3)])
async def test_for_the_tools_no_more_of_the_nodes_is_read_than_which_relay_has_them(
    hub: Hub, server: Server, monkeypatch: pytest.MonkeyPatch, relays: int, pages: int
) -> None:
    asked = []

    def counted(resources: FleetResources, tenant: str, path: str, query: str) -> str | None:
        asked.append(query)
        return read_document(resources, tenant, path, query)

    read_document = FleetResources.read
    monkeypatch.setattr(FleetResources, "read", counted)
    monkeypatch.setattr("relay.mcp_api.resources.NODES_PER_PAGE", 2)
    if relays > 1:
        hub.peers = OtherRelay()
    async with ServedRelay.open(hub, server) as served:
        assert await read(served, "tools") == []
        assert asked == []
        for number in range(5):
            hub.connect(hub.ca.issue(f"01hzx9k3m4p7q8r9s0t1v2{number:04}"))
        assert len(await read(served, "tools")) == 10
    assert len(asked) == pages


async def test_a_token_that_is_not_accepted_is_an_error(served: ServedRelay) -> None:
    with pytest.raises(FleetReadError, match="the relay refuses"):
        await read(served, "nodes", "no-token")
    with pytest.raises(FleetReadError, match="the relay refuses"):
        await read(served, "nodes", served.hub.token(["sessions:message"]))


async def test_a_relay_that_is_not_there_is_an_error() -> None:
    http = RelayHttp(f"http://127.0.0.1:{unused_port()}/mcp", RenewableToken("x"), client_context())
    with pytest.raises(NotSentError):
        await FleetReader(http).tools()
    await http.close()


@pytest.mark.parametrize("text", ["[]", "null", "no JSON", json.dumps({"nodes": None}), "{}"])
async def test_a_malformed_list_of_nodes_is_an_error(
    served: ServedRelay, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.setattr("relay.mcp_api.resources.FleetResources.read", lambda *_: text)
    with pytest.raises(FleetReadError, match="malformed"):
        await read(served, "nodes")
