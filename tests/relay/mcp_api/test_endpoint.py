"""What clients of both eras can list and read, and what the relay says of itself."""

from typing import Any

import pytest
from mcp.shared.exceptions import MCPError
from mcp_types import INVALID_PARAMS, TextResourceContents

from relay.auth.permissions import Rights
from relay.limits.rate_limits import Allowance
from relay.mcp_api.endpoint import LIST_TTL_MS
from relay.mcp_api.tool_list import MAX_PAGE_BYTES, PAGE_SIZE
from schemas.labels import NodeName
from schemas.projection import META_CANONICAL_NAME, META_ERROR, META_SAFETY_CLASS
from tests.fakes.hub import Hub
from tests.fakes.mcp_stage import ECHO_NAME, ERAS, METRICS_NAME, NEW, OLD, OTHER, PING, Era, Stage
from tests.fakes.refusals import audited_refusals, refusal
from tests.fakes.routers import ScriptedRouter
from tests.fakes.serving import Server
from tests.fakes.signer import ECHO, METRICS, NODE_ID, OTHER_NODE_ID, TENANT, SimulatedNode

pytestmark = [pytest.mark.integration, pytest.mark.asyncio(loop_scope="module")]

# --- what is listed -----------------------------------------------------------------------------------


@pytest.mark.holds("RFC-0001/3/x-safety-class")
@pytest.mark.parametrize("era", ERAS)
async def test_the_list_on_the_wire_is_what_the_catalog_says_safety_class_and_all(
    stage: Stage, era: Era
) -> None:
    tools = stage.hub.fleet.selected.listed(Rights(TENANT, frozenset({"read_only"})))
    async with stage.wire(era) as wire:
        listed = (await wire.result("tools/list"))["tools"]
    assert listed == [tool.listed() for tool in tools]
    assert [tool["name"] for tool in listed] == [METRICS_NAME, ECHO_NAME]
    for tool in listed:
        assert tool["annotations"]["x-safety-class"] == "read_only"
        assert tool["_meta"][META_SAFETY_CLASS] == "read_only"


async def test_only_the_new_era_is_told_how_long_a_list_is_good(stage: Stage) -> None:
    async with stage.wire(NEW) as wire:
        new = await wire.result("tools/list")
    async with stage.wire("legacy") as wire:
        old = await wire.result("tools/list")
    assert (new["ttlMs"], new["cacheScope"], new["resultType"]) == (LIST_TTL_MS, "private", "complete")
    assert old.keys() == {"tools"}


@pytest.mark.parametrize("url", ["?names=dashed", "/tools"])
@pytest.mark.parametrize("era", ERAS)
async def test_dashed_names_are_listed_to_who_asks_for_them(stage: Stage, era: Era, url: str) -> None:
    async with stage.wire(era, query=url) as wire:
        dashed = (await wire.result("tools/list"))["tools"]
    assert [tool["name"] for tool in dashed] == [
        METRICS_NAME.replace(".", "-"),
        ECHO_NAME.replace(".", "-"),
    ]
    assert [tool["_meta"][META_CANONICAL_NAME] for tool in dashed] == [METRICS_NAME, ECHO_NAME]


@pytest.mark.parametrize("era", ERAS)
async def test_another_form_of_names_is_refused(stage: Stage, era: Era) -> None:
    async with stage.wire(era, query="?names=camel") as wire:
        error = (await wire.ask("tools/list"))["error"]
    assert error["code"] == INVALID_PARAMS
    assert "dotted or dashed" in error["message"]


@pytest.mark.parametrize("era", ERAS)
async def test_a_list_of_more_than_a_thousand_tools_comes_in_pages_without_gap_or_overlap(
    stage: Stage, era: Era
) -> None:
    capabilities = [{**ECHO, "cap_id": f"echo{number}"} for number in range(256)]
    for number in range(4):
        node = stage.hub.ca.issue(f"01hzx9k3m4p7q8r9s0t1v2w3x{number}")
        stage.hub.connect(node, capabilities=capabilities)
    pages: list[list[str]] = []
    async with stage.client(era) as client:
        cursor = None
        while cursor is not None or not pages:
            page = await client.list_tools(cursor=cursor)
            pages.append([tool.name for tool in page.tools])
            cursor = page.next_cursor
    names = [name for page in pages for name in page]
    assert len(pages) > 1
    assert all(0 < len(page) <= PAGE_SIZE for page in pages)
    assert len(set(names)) == len(names) == 4 * 256 + 2
    expected = stage.hub.fleet.selected.listed(Rights(TENANT, frozenset({"read_only"})))
    assert names == [tool.canonical for tool in expected]


@pytest.mark.parametrize("era", ERAS)
async def test_a_page_is_never_larger_than_clients_take(stage: Stage, era: Era) -> None:
    capabilities = [{**METRICS, "cap_id": f"metrics{number}"} for number in range(256)]
    for number in range(3):
        node = stage.hub.ca.issue(f"01hzx9k3m4p7q8r9s0t1v2w3x{number}")
        stage.hub.connect(node, capabilities=capabilities)
    async with stage.wire(era) as wire:
        response = await wire.post("tools/list")
    assert MAX_PAGE_BYTES // 2 < len(response.content) < 1024 * 1024
    assert "nextCursor" in response.text


@pytest.mark.parametrize("era", ERAS)
@pytest.mark.parametrize(
    ("token", "listed"),
    [
        pytest.param({"tenant": "globex"}, [], id="another tenant"),
        pytest.param(
            {"scopes": ["sessions:message"]},
            ["caller_tool_response", "session_events", "session_message"],
            id="no scope for tools of nodes",
        ),
    ],
)
async def test_no_caller_sees_what_it_could_not_call(
    stage: Stage, era: Era, token: dict[str, Any], listed: list[str]
) -> None:
    async with stage.client(era, token=stage.hub.token(**token)) as client:
        assert [tool.name for tool in (await client.list_tools()).tools] == listed


# --- resources and the rest ---------------------------------------------------------------------------


@pytest.mark.parametrize("era", ERAS)
async def test_all_that_is_listed_can_be_read(stage: Stage, era: Era, node: SimulatedNode) -> None:
    async with stage.client(era) as client:
        resources = (await client.list_resources()).resources
        texts = {}
        for resource in resources:
            (content,) = (await client.read_resource(resource.uri)).contents
            assert isinstance(content, TextResourceContents)
            assert (content.uri, content.mime_type) == (resource.uri, resource.mime_type)
            texts[content.uri] = content.text
    of_the_node = [f"node://{NODE_ID}/manifest", f"node://{NODE_ID}/identity"]
    assert list(texts) == ["fleet://nodes", "fleet://changes", *of_the_node]
    assert texts[f"node://{NODE_ID}/manifest"].encode() == node.manifest()
    assert texts[f"node://{NODE_ID}/identity"] == node.leaf_pem


@pytest.mark.parametrize("era", ERAS)
@pytest.mark.parametrize("token", [{}, {"tenant": "globex"}], ids=["nowhere", "another tenant's"])
async def test_a_resource_that_is_not_there_cannot_be_told_from_another_tenants(
    stage: Stage, era: Era, token: dict[str, Any]
) -> None:
    node_id = NODE_ID if token else OTHER_NODE_ID
    async with stage.client(era, token=stage.hub.token(**token)) as client:
        with pytest.raises(MCPError) as caught:
            await client.read_resource(f"node://{node_id}/manifest")
    assert caught.value.error.code == INVALID_PARAMS
    assert caught.value.error.message == "Resource not found"


@pytest.mark.parametrize("era", ERAS)
async def test_the_relay_says_what_it_is_and_has_no_prompts(stage: Stage, era: Era) -> None:
    async with stage.client("auto" if era == NEW else era) as client:
        assert client.server_info is not None
        assert client.server_info.name == "edge-kubelet"
        assert client.protocol_version == (NEW if era == NEW else OLD)
        assert (await client.list_prompts()).prompts == []


# --- listing costs too --------------------------------------------------------------------------------


@pytest.mark.parametrize("era", ERAS)
async def test_listing_counts_towards_the_agents_share_as_a_call_does(
    hub: Hub, node: SimulatedNode, router: ScriptedRouter, server: Server, era: Era
) -> None:
    assert node.node_id == NODE_ID
    # Two lists of two tools each are 2.2 calls; the older era has sent ``initialize`` before.
    narrow = Allowance(0.001, 2.5 if era == NEW else 3.5, 9)
    async with Stage(hub, router, server, narrow).running() as stage:
        async with stage.wire(era) as wire:
            for _ in range(2):
                assert len((await wire.result("tools/list"))["tools"]) == 2
            error = (await wire.ask("tools/list"))["error"]
            assert "E_RATE_LIMITED" in error["message"]
            assert error["data"]["code"] == "E_RATE_LIMITED"
            assert error["data"]["retry_after_ms"] > 0
            called = await wire.result("tools/call", {"name": ECHO_NAME, "arguments": PING})
            assert called["_meta"][META_ERROR]["code"] == "E_RATE_LIMITED"
        async with stage.wire(era, token=hub.token(**OTHER)) as wire:
            assert len((await wire.result("tools/list"))["tools"]) == 2
    assert audited_refusals(hub) == [refusal("call_refused", f"{TENANT}/agent-1", "E_RATE_LIMITED", 2)]


async def test_a_malformed_message_counts_as_a_call_does(
    hub: Hub, router: ScriptedRouter, server: Server
) -> None:
    async with Stage(hub, router, server, Allowance(0.001, 2.5, 9)).running() as stage, stage.http() as http:
        malformed = {"jsonrpc": "2.0", "method": "tools/list"}
        responses = [await http.post("/mcp", json=malformed) for _ in range(4)]
    assert [response.status_code for response in responses] == [400, 400, 429, 429]
    assert int(responses[2].headers["retry-after"]) > 0
    assert len(hub.access_lines.entries()) == 2
    assert audited_refusals(hub) == [refusal("call_refused", f"{TENANT}/agent-1", "E_RATE_LIMITED", 2)]


@pytest.mark.parametrize("mode", ["legacy", "auto"], ids=["initialize", "server/discover"])
async def test_the_instructions_name_the_nodes_of_the_callers_tenant_alone(stage: Stage, mode: str) -> None:
    stage.hub.fleet.rename({NODE_ID: NodeName(TENANT, "greenhouse pi")})
    async with (
        stage.client(mode) as client,
        stage.client(mode, token=stage.hub.token(tenant="globex")) as stranger,
    ):
        assert '"greenhouse pi"' in (client.instructions or "")
        assert stranger.instructions
        assert "greenhouse" not in stranger.instructions


async def test_the_instructions_are_private_to_their_caller(stage: Stage) -> None:
    stage.hub.fleet.rename({NODE_ID: NodeName(TENANT, "greenhouse pi")})
    async with stage.wire(NEW) as wire:
        discovered = await wire.result("server/discover")
    assert '"greenhouse pi"' in discovered["instructions"]
    assert discovered["cacheScope"] == "private"
