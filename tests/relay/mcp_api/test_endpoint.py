import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, Literal

import httpx2
import pytest
import pytest_asyncio
from mcp.client.client import Client
from mcp.client.session import IncomingMessage
from mcp.client.streamable_http import streamable_http_client
from mcp.client.subscriptions import ToolsListChanged
from mcp.shared.exceptions import MCPError
from mcp_types import (
    CLIENT_CAPABILITIES_META_KEY,
    CLIENT_INFO_META_KEY,
    HEADER_MISMATCH,
    INVALID_PARAMS,
    PROTOCOL_VERSION_META_KEY,
    TextContent,
    TextResourceContents,
    ToolListChangedNotification,
)
from starlette.applications import Starlette

from relay.allowance import Allowance
from relay.auth.permissions import Rights
from relay.config import PER_AGENT
from relay.fleet.change_notifier import ChangeNotifier, Listener
from relay.fleet.name_ledger import NodeName
from relay.fleet.selection import WHOLE_FLEET, Selection
from relay.http.body_parser import MAX_BODY_BYTES
from relay.http.request_guard import AllowedHosts, RequestGuard
from relay.mcp_api.methods import LIST_TTL_MS
from relay.mcp_api.open_streams import OpenStreams
from relay.mcp_api.paging import MAX_PAGE_BYTES, PAGE_SIZE
from relay.routing.port import LocalRouter
from schemas.errors import Failure, ToolError
from schemas.meta_names import META_CANONICAL_NAME, META_ERROR, META_HOP, META_SAFETY_CLASS
from schemas.tls import client_context
from tests.fakes.hub import PUBLIC_URL, Hub
from tests.fakes.issuer import TwoIssuers, outside_token
from tests.fakes.refusals import audited_refusals, refusal
from tests.fakes.routers import ScriptedRouter, SilentRouter
from tests.fakes.serving import Server
from tests.fakes.signer import ECHO, METRICS, NODE_ID, NOW_MS, OTHER_NODE_ID, TENANT, SimulatedNode

pytestmark = pytest.mark.asyncio(loop_scope="module")

BOUND_S = 20
OLD, NEW = "2025-11-25", "2026-07-28"
Era = Literal["legacy", "2026-07-28"]
ERAS = [pytest.param("legacy", id="2025"), pytest.param(NEW, id="2026")]
ECHO_NAME = f"sysecho.{NODE_ID}.echo.invoke"
METRICS_NAME = f"sys.{NODE_ID}.sysmetrics.snapshot"
PING = {"message": "ping"}
ACCEPT = "application/json, text/event-stream"


class CountingNotifier(ChangeNotifier):
    """Counts who has begun to listen."""

    listeners = 0

    def listen(
        self, rights: Rights, listener: Listener, selection: Selection = WHOLE_FLEET
    ) -> Callable[[], None]:
        self.listeners += 1
        return super().listen(rights, listener, selection)


class Stage:
    """A relay's side of MCP behind its guard, on a real server."""

    def __init__(
        self, hub: Hub, router: LocalRouter, server: Server, per_agent: Allowance = PER_AGENT
    ) -> None:
        self.hub = hub
        self.address = server.address
        self.notifier = CountingNotifier(hub.fleet, hub.log, interval_s=0.001)
        self.streams = OpenStreams()
        self._server = server
        self.mcp = hub.mcp(hub.gateway(router, per_agent=per_agent), self.notifier, self.streams)

    @asynccontextmanager
    async def running(self) -> AsyncIterator["Stage"]:
        self._server.app = RequestGuard(
            allowed=AllowedHosts.of(PUBLIC_URL, self.address),
            authenticator=self.hub.authenticator,
            metadata_url=None,
            metrics=self.hub.metrics,
            refusals=self.hub.refusals,
            mcp=self.mcp,
            node_sessions=Starlette(),
            other=Starlette(),
        )
        ready = asyncio.Event()
        tasks = [asyncio.create_task(self._serve(ready)), asyncio.create_task(self.notifier.run())]
        await ready.wait()
        yield self
        assert not any(task.done() for task in tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _serve(self, ready: asyncio.Event) -> None:
        async with self.mcp.running():
            ready.set()
            await asyncio.Event().wait()

    @asynccontextmanager
    async def http(self, token: str | None = None) -> AsyncIterator[httpx2.AsyncClient]:
        headers = {"Authorization": f"Bearer {token or self.hub.token()}"}
        base_url = f"http://{self.address}"
        # Its own context would read all the roots of the machine, those that its environment does not name.
        tls = client_context()
        async with httpx2.AsyncClient(
            base_url=base_url, headers=headers, trust_env=False, verify=tls
        ) as http:
            yield http

    @asynccontextmanager
    async def client(
        self,
        era: str,
        *,
        token: str | None = None,
        query: str = "",
        heard: "Notified | None" = None,
    ) -> AsyncIterator[Client]:
        """Hold an official client."""
        async with asyncio.timeout(BOUND_S), self.http(token) as http:
            transport = streamable_http_client(f"http://{self.address}/mcp{query}", http_client=http)
            async with Client(transport, mode=era, message_handler=heard) as client:
                yield client

    @asynccontextmanager
    async def wire(self, era: str, *, token: str | None = None, query: str = "") -> AsyncIterator["Wire"]:
        """Hold a client that shows what is really sent."""
        async with asyncio.timeout(BOUND_S), self.http(token) as http:
            wire = Wire(http, f"/mcp{query}", era)
            if era == "legacy":
                await wire.initialize()
            yield wire


class Notified:
    """Hears notifications of the old era."""

    def __init__(self) -> None:
        self._heard: asyncio.Queue[IncomingMessage] = asyncio.Queue()

    async def __call__(self, message: IncomingMessage) -> None:
        self._heard.put_nowait(message)

    async def next(self) -> IncomingMessage:
        return await asyncio.wait_for(self._heard.get(), BOUND_S)

    @property
    def is_empty(self) -> bool:
        return self._heard.empty()


class Wire:
    """MCP by hand, so that what the official client does not know is seen too."""

    def __init__(self, http: httpx2.AsyncClient, path: str, era: str) -> None:
        self.http = http
        self.headers = {"accept": ACCEPT, "content-type": "application/json"}
        self._path = path
        self._era = era

    async def initialize(self) -> None:
        params = {
            "protocolVersion": OLD,
            "capabilities": {},
            "clientInfo": {"name": "wire", "version": "0"},
        }
        response = await self.post("initialize", params)
        response.raise_for_status()
        self.headers["mcp-session-id"] = response.headers["mcp-session-id"]
        self.headers["mcp-protocol-version"] = OLD
        await self.notify("notifications/initialized")

    async def notify(self, method: str) -> None:
        body = {"jsonrpc": "2.0", "method": method}
        (await self.http.post(self._path, json=body, headers=self.headers)).raise_for_status()

    async def post(self, method: str, params: dict[str, Any] | None = None) -> httpx2.Response:
        headers, params = dict(self.headers), dict(params or {})
        if self._era == NEW:
            headers |= {"mcp-protocol-version": NEW, "mcp-method": method}
            if isinstance(name := params.get("name", params.get("uri")), str):
                headers["mcp-name"] = name
            params["_meta"] = {
                PROTOCOL_VERSION_META_KEY: NEW,
                CLIENT_INFO_META_KEY: {"name": "wire", "version": "0"},
                CLIENT_CAPABILITIES_META_KEY: {},
            }
        body = {"jsonrpc": "2.0", "id": 1, "method": method, "params": params}
        return await self.http.post(self._path, json=body, headers=headers)

    async def ask(self, method: str, params: dict[str, Any] | None = None) -> dict[str, Any]:
        """Return the JSON-RPC answer, whether it came as JSON or as an event."""
        response = await self.post(method, params)
        text = response.text
        if response.headers["content-type"].startswith("text/event-stream"):
            text = next(line[5:] for line in text.splitlines() if line.startswith("data: {"))
        answer: dict[str, Any] = json.loads(text)
        return answer

    async def result(self, method: str, params: dict[str, Any] | None = None) -> dict[str, Any]:
        result: dict[str, Any] = (await self.ask(method, params))["result"]
        return result


@pytest.fixture
def router() -> ScriptedRouter:
    return ScriptedRouter()


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


# --- what is listed -----------------------------------------------------------------------------------


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


@pytest.mark.parametrize("era", ERAS)
async def test_dashed_names_are_listed_to_who_asks_for_them(stage: Stage, era: Era) -> None:
    async with stage.wire(era, query="?names=dashed") as wire:
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


@pytest.mark.parametrize(
    "cursor", ["!", "w6k", 7, ["x"]], ids=["not base64url", "not ASCII", "number", "list"]
)
async def test_a_cursor_that_the_relay_never_gave_is_refused(stage: Stage, cursor: object) -> None:
    async with stage.wire(NEW) as wire:
        answer = await wire.ask("tools/list", {"cursor": cursor})
    assert answer["error"]["code"] == INVALID_PARAMS


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


# --- calling ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("era", ERAS)
@pytest.mark.parametrize("query", ["", "?names=dashed"])
@pytest.mark.parametrize("name", [ECHO_NAME, ECHO_NAME.replace(".", "-")], ids=["dotted", "dashed"])
async def test_both_forms_of_a_name_can_be_called_always(
    stage: Stage, router: ScriptedRouter, era: Era, query: str, name: str
) -> None:
    async with stage.client(era, query=query) as client:
        result = await client.call_tool(name, PING)
    assert not result.is_error
    (content,) = result.content
    assert isinstance(content, TextContent)
    assert json.loads(content.text) == result.structured_content
    assert result.structured_content == {"message": "ping", "received_at_ms": NOW_MS, "node_id": NODE_ID}
    assert router.commands[0].tool == ECHO_NAME


@pytest.mark.parametrize("era", ERAS)
async def test_an_error_is_a_result_whose_envelope_stands_in_text_and_meta_and_nowhere_else(
    stage: Stage, router: ScriptedRouter, era: Era
) -> None:
    def offline(_command: object) -> dict[str, Any]:
        raise ToolError(Failure.NODE_OFFLINE)

    router.answer = offline
    async with stage.wire(era) as wire:
        result = await wire.result("tools/call", {"name": ECHO_NAME, "arguments": PING})
    assert result["isError"] is True
    (content,) = result["content"]
    envelope = json.loads(content["text"])
    assert (result["_meta"][META_ERROR], result["_meta"][META_HOP]) == (envelope, "session")
    assert envelope["code"] == "E_NODE_OFFLINE"
    assert stage.hub.registry.load("error@1.0.0").is_valid(envelope)
    assert "structuredContent" not in result


@pytest.mark.parametrize("era", ERAS)
async def test_the_official_client_takes_an_error_as_one(stage: Stage, era: Era) -> None:
    async with stage.client(era) as client:
        await client.list_tools()
        result = await client.call_tool(ECHO_NAME, {"message": 1})
    assert result.is_error
    assert result.structured_content is None
    assert result.meta is not None
    assert result.meta[META_ERROR]["code"] == "E_MANIFEST_INVALID"


@pytest.mark.parametrize("era", ERAS)
@pytest.mark.parametrize(
    "params",
    [
        pytest.param({}, id="none"),
        pytest.param({"arguments": None}, id="null"),
        pytest.param({"arguments": {}}, id="empty"),
    ],
)
async def test_no_arguments_are_empty_arguments(
    stage: Stage, router: ScriptedRouter, era: Era, params: dict[str, Any]
) -> None:
    sample = {"ts_ms": NOW_MS, "node_id": NODE_ID, "uptime_s": 1}
    router.answer = lambda _: {"ok": True, "result": sample}
    async with stage.wire(era) as wire:
        result = await wire.result("tools/call", {"name": METRICS_NAME, **params})
    assert result["structuredContent"] == sample
    assert router.commands[0].arguments == {}


@pytest.mark.parametrize("era", ERAS)
@pytest.mark.parametrize("params", [{}, {"name": 7}, {"name": None}, {"name": [ECHO_NAME]}], ids=str)
async def test_a_call_without_a_name_is_no_call(
    stage: Stage, router: ScriptedRouter, era: Era, params: dict[str, Any]
) -> None:
    async with stage.wire(era) as wire:
        answer = await wire.ask("tools/call", {**params, "arguments": PING})
    if era == NEW and params.get("name") is not None:
        # The SDK compares the name with its header, before anything else.
        assert answer["error"]["code"] == HEADER_MISMATCH
    else:
        envelope = answer["result"]["_meta"][META_ERROR]
        assert envelope["code"] == "E_MANIFEST_INVALID"
        assert envelope["message"] == "The request is not a call: /tool violates pattern."
    assert router.commands == []


@pytest.mark.parametrize("era", ERAS)
@pytest.mark.parametrize("arguments", [["ping"], "ping", 7], ids=str)
async def test_arguments_that_are_no_object_are_refused_by_the_gateway(
    stage: Stage, router: ScriptedRouter, era: Era, arguments: object
) -> None:
    async with stage.wire(era) as wire:
        result = await wire.result("tools/call", {"name": ECHO_NAME, "arguments": arguments})
    assert result["_meta"][META_ERROR]["code"] == "E_MANIFEST_INVALID"
    assert router.commands == []


@pytest.mark.parametrize("era", ERAS)
async def test_when_the_agent_gives_up_the_node_is_not_waited_for(hub: Hub, server: Server, era: Era) -> None:
    hub.connect(hub.ca.issue())
    router = SilentRouter()
    async with Stage(hub, router, server).running() as stage, stage.client(era) as client:
        calling = asyncio.create_task(client.call_tool(ECHO_NAME, PING))
        await router.asked.wait()
        calling.cancel()
        await router.given_up.wait()
        with pytest.raises(asyncio.CancelledError):
            await calling
    assert [line["code"] for line in hub.audited()] == ["ok", "cancelled"]


# --- what has changed ---------------------------------------------------------------------------------


async def test_a_client_of_the_old_era_is_told_that_the_list_has_changed(stage: Stage) -> None:
    notes = Notified()
    async with stage.client("legacy", heard=notes) as client:
        assert client.server_capabilities.tools is not None
        assert client.server_capabilities.tools.list_changed
        await client.list_tools()
        stage.hub.connect(stage.hub.ca.issue(OTHER_NODE_ID))
        assert isinstance(await notes.next(), ToolListChangedNotification)
        assert len((await client.list_tools()).tools) == 4


async def test_a_client_of_the_new_era_is_told_that_the_list_has_changed(stage: Stage) -> None:
    async with stage.client(NEW) as client, client.listen(tools_list_changed=True) as changes:
        await client.list_tools()
        stage.hub.connect(stage.hub.ca.issue(OTHER_NODE_ID))
        assert isinstance(await anext(changes), ToolsListChanged)
        assert len((await client.list_tools()).tools) == 4


async def test_another_tenants_changes_are_not_told(stage: Stage) -> None:
    theirs = stage.hub.token(tenant="globex")
    async with AsyncExitStack() as stack:
        client = await stack.enter_async_context(stage.client(NEW, token=theirs))
        changes = await stack.enter_async_context(client.listen(tools_list_changed=True))
        ours = await stack.enter_async_context(stage.client(NEW))
        our_changes = await stack.enter_async_context(ours.listen(tools_list_changed=True))
        hearing = asyncio.create_task(anext(changes))
        stage.hub.connect(stage.hub.ca.issue(OTHER_NODE_ID))
        await anext(our_changes)
        assert not hearing.done()
        stage.hub.connect(stage.hub.ca.issue("01hzx9k3m4p7q8r9s0t1v2w3x0", "globex"))
        assert isinstance(await hearing, ToolsListChanged)


async def test_a_subscription_ends_in_good_order_with_its_token(stage: Stage) -> None:
    token = stage.hub.token(ttl_s=1)
    stage.hub.clock.advance(950)
    async with stage.client(NEW, token=token) as client, client.listen(tools_list_changed=True) as changes:
        assert [event async for event in changes] == []


async def test_subscriptions_are_bounded(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stage.streams, "_per_agent", 1)
    async with stage.client(NEW) as client, client.listen(tools_list_changed=True):
        with pytest.raises(MCPError, match="Too many sessions and subscriptions"):
            async with client.listen(tools_list_changed=True):
                raise AssertionError


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
async def test_templates_say_how_resources_are_named(stage: Stage, era: Era) -> None:
    async with stage.client(era) as client:
        templates = (await client.list_resource_templates()).resource_templates
    assert {template.uri_template for template in templates} == {
        "fleet://nodes{?cursor}",
        "fleet://changes{?since_ms}",
        "node://{node_id}/manifest",
        "node://{node_id}/identity",
        "node://{node_id}/telemetry{?since_ms,cap}",
        "schema://{kind}@{semver}",
    }


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


# --- who may use what is open -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "other_caller",
    [
        pytest.param({"sub": "agent-2"}, id="another agent of the tenant"),
        pytest.param({"tenant": "globex"}, id="an agent of another tenant"),
    ],
)
async def test_a_session_of_the_old_era_is_its_owners_alone(
    stage: Stage, other_caller: dict[str, Any]
) -> None:
    async with stage.wire("legacy") as wire:
        assert (await wire.result("tools/list"))["tools"]
        wire.http.headers["Authorization"] = f"Bearer {stage.hub.token(**other_caller)}"
        assert (await wire.post("tools/list")).status_code == 404
        wire.http.headers["Authorization"] = f"Bearer {stage.hub.token()}"
        assert (await wire.result("tools/list"))["tools"]


@pytest.mark.integration
async def test_agents_of_one_name_from_two_issuers_have_no_session_in_common(
    hub: Hub, router: ScriptedRouter, server: Server
) -> None:
    async with TwoIssuers.running(hub.registry) as world:
        hub.authenticator = world.authenticator
        async with Stage(hub, router, server).running() as stage, stage.wire("legacy") as wire:
            wire.http.headers["Authorization"] = f"Bearer {outside_token(sub='agent-1', tenant=TENANT)}"
            assert (await wire.post("tools/list")).status_code == 404
            wire.http.headers["Authorization"] = f"Bearer {hub.token()}"
            assert (await wire.post("tools/list")).status_code == 200


@pytest.mark.parametrize("era", ERAS)
async def test_a_token_that_ends_ends_what_it_was_good_for(stage: Stage, era: Era) -> None:
    async with stage.wire(era, token=stage.hub.token(ttl_s=60)) as wire:
        assert (await wire.post("tools/list")).status_code == 200
        stage.hub.clock.advance(60_000)
        refused = await wire.post("tools/list")
    assert refused.status_code == 401
    assert 'error="invalid_token"' in refused.headers["www-authenticate"]


@pytest.mark.parametrize("era", ERAS)
async def test_a_body_over_a_mebibyte_is_refused(stage: Stage, router: ScriptedRouter, era: Era) -> None:
    async with stage.wire(era) as wire:
        params = {"name": ECHO_NAME, "arguments": {"message": "x" * MAX_BODY_BYTES}}
        assert (await wire.post("tools/call", params)).status_code == 413
    assert router.commands == []


async def test_a_client_that_says_again_that_it_is_ready_is_followed_once(stage: Stage) -> None:
    async with stage.wire("legacy") as wire:
        for _ in range(3):
            await wire.notify("notifications/initialized")
        await wire.result("tools/list")
        assert stage.notifier.listeners == 1


async def test_a_session_is_not_opened_by_a_url_with_an_option_that_there_is_not(stage: Stage) -> None:
    async with asyncio.timeout(BOUND_S), stage.http() as http:
        params = {"protocolVersion": OLD, "capabilities": {}, "clientInfo": {"name": "wire", "version": "0"}}
        answer = await Wire(http, "/mcp?veiw=kinds", "legacy").ask("initialize", params)
    assert (answer["error"]["code"], "result" in answer) == (-32602, False)
    assert answer["error"]["message"].endswith("; did you mean view?")


# --- shares of what is open ---------------------------------------------------------------------------

OTHER: dict[str, Any] = {"sub": "agent-2"}


async def opening(stage: Stage, token: str | None = None) -> httpx2.Response:
    """Try to open a session of the old era by hand."""
    async with stage.http(token) as http:
        params = {"protocolVersion": OLD, "capabilities": {}, "clientInfo": {"name": "wire", "version": "0"}}
        return await Wire(http, "/mcp", "legacy").post("initialize", params)


@pytest.fixture
def one_each(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> Stage:
    """The relay, on which each agent may hold one session or subscription."""
    monkeypatch.setattr(stage.streams, "_per_agent", 1)
    return stage


async def test_an_agents_sessions_are_bounded_and_anothers_are_not_touched(one_each: Stage) -> None:
    async with one_each.wire("legacy") as wire:
        refused = await opening(one_each)
        assert refused.status_code == 429
        assert refused.json() == {
            "error": "sessions",
            "message": "Too many sessions and subscriptions are open; close one.",
        }
        for other_caller in (OTHER, {"tenant": "globex"}):
            assert (await opening(one_each, one_each.hub.token(**other_caller))).status_code == 200
        assert (await wire.result("tools/list"))["tools"]


async def test_a_second_token_of_the_same_agent_opens_no_more(one_each: Stage) -> None:
    async with one_each.wire("legacy"):
        assert (await opening(one_each, one_each.hub.token(ttl_s=60))).status_code == 429


async def test_a_session_that_has_ended_gives_its_place_back(one_each: Stage) -> None:
    for _ in range(3):
        async with one_each.wire("legacy") as wire:
            ended = await wire.http.delete("/mcp", headers=wire.headers)
            assert ended.status_code == 200
    async with asyncio.timeout(BOUND_S):
        while (await opening(one_each)).status_code == 429:
            pass
        assert (await opening(one_each)).status_code == 429


async def test_a_request_for_an_event_stream_without_a_session_counts_as_one_that_opens_it(
    one_each: Stage,
) -> None:
    # The SDK allocates a session for it before it reads the method.
    async with one_each.wire("legacy") as wire:
        refused = await wire.http.get("/mcp", headers={"accept": "text/event-stream"})
        assert refused.status_code == 429


async def test_what_opens_no_session_leaves_no_place_taken(one_each: Stage) -> None:
    async with one_each.http() as http:
        wire = Wire(http, "/mcp", "legacy")
        assert (await http.get("/mcp", headers={"accept": "text/event-stream"})).status_code == 400
        assert (await wire.post("tools/list")).status_code == 400
        assert (await http.post("/mcp", content=b"{", headers=wire.headers)).status_code == 400
        assert (await http.delete("/mcp")).status_code >= 400
    assert (await opening(one_each)).status_code == 200


async def test_one_session_takes_one_place_however_often_it_begins(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Each would otherwise be one of the places of all, which a single agent could use up.
    monkeypatch.setattr(stage.streams, "_per_agent", 2)
    params = {"protocolVersion": OLD, "capabilities": {}, "clientInfo": {"name": "wire", "version": "0"}}
    async with stage.wire("legacy") as wire:
        for _ in range(5):
            await wire.post("initialize", params)
            await wire.notify("notifications/initialized")
        assert (await opening(stage)).status_code == 200
        assert (await opening(stage)).status_code == 429


async def test_subscriptions_and_sessions_share_an_agents_room(one_each: Stage) -> None:
    async with one_each.client(NEW) as client:
        async with client.listen(tools_list_changed=True):
            assert (await opening(one_each)).status_code == 429
            theirs = one_each.hub.token(**OTHER)
            async with one_each.client(NEW, token=theirs) as other, other.listen(tools_list_changed=True):
                pass
        async with asyncio.timeout(BOUND_S):
            while (await opening(one_each)).status_code == 429:
                pass


async def test_a_subscription_that_its_client_has_left_gives_its_place_back(one_each: Stage) -> None:
    for _ in range(3):
        async with one_each.client(NEW) as client, asyncio.timeout(BOUND_S):
            while True:
                try:
                    async with client.listen(tools_list_changed=True):
                        break
                except MCPError as error:
                    assert "Too many sessions" in error.error.message  # noqa: PT017 - until it is noticed


# --- a token that is revoked --------------------------------------------------------------------------


async def test_revoking_its_token_ends_a_subscription_in_good_order_and_no_other(stage: Stage) -> None:
    revoked, other = stage.hub.token(), stage.hub.token()
    jti = stage.hub.authenticator.identify(revoked).jti
    async with AsyncExitStack() as stack:
        client = await stack.enter_async_context(stage.client(NEW, token=revoked))
        changes = await stack.enter_async_context(client.listen(tools_list_changed=True))
        theirs = await stack.enter_async_context(stage.client(NEW, token=other))
        their_changes = await stack.enter_async_context(theirs.listen(tools_list_changed=True))
        stage.mcp.revoke({jti})
        assert [event async for event in changes] == []
        stage.hub.connect(stage.hub.ca.issue(OTHER_NODE_ID))
        assert isinstance(await anext(their_changes), ToolsListChanged)


async def test_revoking_its_token_ends_what_a_session_of_the_old_era_is_told(stage: Stage) -> None:
    notes, other_listener = Notified(), Notified()
    revoked, other = stage.hub.token(), stage.hub.token(**OTHER)
    async with (
        stage.client("legacy", token=revoked, heard=notes) as client,
        stage.client("legacy", token=other, heard=other_listener) as others_client,
    ):
        await client.list_tools()
        await others_client.list_tools()
        jti = stage.hub.authenticator.identify(revoked).jti
        stage.mcp.revoke({jti})
        stage.hub.connect(stage.hub.ca.issue(OTHER_NODE_ID))
        assert isinstance(await other_listener.next(), ToolListChangedNotification)
        assert notes.is_empty
        stage.hub.authenticator.revoke(frozenset({jti}))
        async with stage.http(revoked) as http:
            assert (await Wire(http, "/mcp", NEW).post("tools/list")).status_code == 401


# --- listing costs too --------------------------------------------------------------------------------


@pytest.mark.parametrize("era", ERAS)
async def test_listing_counts_towards_the_agents_share_as_a_call_does(
    hub: Hub, node: SimulatedNode, router: ScriptedRouter, server: Server, era: Era
) -> None:
    assert node.node_id == NODE_ID
    narrow = Allowance(0.001, 2.5, 9)  # two lists of two tools each are 2.2 calls
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
