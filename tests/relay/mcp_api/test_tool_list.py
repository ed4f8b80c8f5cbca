"""The pages of ``tools/list``. What clients make of them is in ``test_endpoint``."""

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from relay.auth.agent_tokens import Caller
from relay.auth.permissions import Rights
from relay.calls.envelope import Call
from relay.fleet.tools import Tool
from relay.mcp_api.tool_list import (
    MAX_PAGE_BYTES,
    PAGE_SIZE,
    CursorError,
    Listed,
    page_of,
    text_of,
    with_documents,
)
from relay.observability.ascii_json import encoded
from schemas.addresses import View
from schemas.keys import base64url
from schemas.labels import NodeName
from tests.fakes.followed import FOLLOWED, SUBSCRIBE
from tests.fakes.gateway_calls import parrot
from tests.fakes.hub import Hub
from tests.fakes.routers import ScriptedRouter
from tests.fakes.shipped_kinds import ECHO, KINDS, METRICS
from tests.fakes.signer import NODE_ID, OTHER_NODE_ID, TENANT

READ = ("name", "title", "description", "inputSchema")

OFFERS = {f"{kind.short}.{verb}" for kind in KINDS for verb in kind.verbs}


class Stage:
    def __init__(self, hub: Hub) -> None:
        self.hub = hub
        self.methods = hub.mcp(hub.gateway(ScriptedRouter())).methods

    async def page(
        self, query: str = "", cursor: str | None = None, scope: str = "tools:call:read_only"
    ) -> dict[str, Any]:
        principal = self.hub.authenticator.identify(self.hub.token((scope,)))
        message = {"params": {} if cursor is None else {"cursor": cursor}}
        return await self.methods.table["tools/list"](Caller(principal, "http", {}, query), message, None)

    async def tools(self, query: str = "", **of: Any) -> list[dict[str, Any]]:
        tools: list[dict[str, Any]] = json.loads((await self.page(query, **of))["tools"].text())
        return tools

    def streams(self, message: dict[str, Any]) -> bool:
        return self.methods.gateway.streams(Call(message))

    async def names(self, query: str = "", **of: Any) -> list[str]:
        return [tool["name"] for tool in await self.tools(query, **of)]


@pytest.fixture
def stage(hub: Hub) -> Stage:
    return Stage(hub)


async def test_tools_of_the_relay_are_sorted_with_those_of_the_nodes(stage: Stage) -> None:
    for name in ("a_first", "syr.middle", "z_last"):
        stage.hub.relay_tools.register(parrot(stage.hub.registry, canonical=name))
    stage.hub.connect(stage.hub.ca.issue())
    names = await stage.names()
    assert names == sorted(names)
    assert len(names) == 5


@pytest.mark.parametrize(("query", "name"), [("", "relay.parrot"), ("names=dashed", "relay-parrot")])
async def test_a_tool_of_the_relay_is_listed_under_either_form_of_its_name(
    stage: Stage, query: str, name: str
) -> None:
    tool = parrot(stage.hub.registry)
    stage.hub.relay_tools.register(tool)
    page = await stage.page(query)
    document = with_documents(page)
    assert json.loads(text_of(page)) == document
    (entry,) = document["tools"]
    assert entry["name"] == name
    assert entry["inputSchema"] == tool.schemas.input_schema
    assert "$id" not in entry["inputSchema"]
    assert entry["annotations"]["readOnlyHint"] is True
    assert entry["_meta"]["edge-kubelet/canonical-name"] == "relay.parrot"


def test_a_result_without_tools_is_encoded_as_it_is() -> None:
    result = {"ä": {"b": [None, True]}, "tools": []}
    assert text_of(result) == encoded(result)
    assert with_documents(result) == result


@pytest.mark.parametrize("position", range(4))
async def test_pages_hold_each_tool_once_wherever_that_of_the_relay_is(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, position: int
) -> None:
    monkeypatch.setattr("relay.mcp_api.tool_list.PAGE_SIZE", 1)
    stage.hub.connect(stage.hub.ca.issue())
    name = ("a", "sysa", "sysm.x", "z")[position]
    stage.hub.relay_tools.register(parrot(stage.hub.registry, canonical=name))
    seen, cursor = [], None
    for _ in range(3):
        page = await stage.page(cursor=cursor)
        (tool,) = page["tools"].document()
        seen.append(tool["name"])
        cursor = page.get("nextCursor")
    assert cursor is None
    assert seen == sorted(seen)
    assert name in seen


async def test_a_tool_is_listed_in_its_views_to_callers_who_may_call_it(stage: Stage) -> None:
    registry = stage.hub.registry
    stage.hub.relay_tools.register(parrot(registry, canonical="in_both"))
    stage.hub.relay_tools.register(parrot(registry, canonical="in_kinds", views=frozenset({View.KINDS})))
    stage.hub.relay_tools.register(
        parrot(registry, canonical="for_messages", visible=lambda rights: rights.may_message)
    )
    assert await stage.names() == ["in_both"]
    assert await stage.names("view=kinds") == ["in_both", "in_kinds"]
    assert "for_messages" in await stage.names(scope="sessions:message")


@pytest.mark.parametrize(("name", "streams"), [("streaming", True), ("relay.parrot", False), (7, False)])
def test_only_a_call_that_may_notify_first_needs_a_stream(stage: Stage, name: object, streams: bool) -> None:  # noqa: FBT001 - of the table
    stage.hub.relay_tools.register(parrot(stage.hub.registry))
    stage.hub.relay_tools.register(parrot(stage.hub.registry, canonical="streaming", streams=True))
    assert stage.streams({"params": {"name": name}}) is streams
    assert stage.streams({"params": None}) is False


@pytest.mark.parametrize(
    ("meta", "streams"),
    [
        ({"io.modelcontextprotocol/logLevel": "info"}, True),
        ({"io.modelcontextprotocol/logLevel": "debug"}, True),
        ({"io.modelcontextprotocol/logLevel": "warning"}, False),
        ({}, False),
        (None, False),
    ],
)
def test_a_tool_that_logs_streams_to_callers_who_opt_in(stage: Stage, meta: object, streams: bool) -> None:  # noqa: FBT001 - of the table
    stage.hub.relay_tools.register(parrot(stage.hub.registry, logs=True))
    assert stage.streams({"params": {"name": "relay.parrot", "_meta": meta}}) is streams


@pytest.mark.parametrize(
    ("name", "meta", "streams"),
    [
        (SUBSCRIBE, {"progressToken": "p"}, True),
        (SUBSCRIBE.replace(".", "-"), {"progressToken": 1}, True),
        ("sys.subscribe", {"progressToken": "p"}, True),
        (SUBSCRIBE, {}, False),
        (SUBSCRIBE, None, False),
        (SUBSCRIBE.replace("subscribe", "snapshot"), {"progressToken": "p"}, False),
        (SUBSCRIBE.replace(NODE_ID, OTHER_NODE_ID), {"progressToken": "p"}, False),
        ("sys.snapshot", {"progressToken": "p"}, False),
        ("no tool", {"progressToken": "p"}, False),
    ],
)
def test_a_subscription_streams_to_callers_with_a_progress_token(
    stage: Stage, name: str, meta: object, *, streams: bool
) -> None:
    stage.hub.connect(stage.hub.ca.issue(), capabilities=[FOLLOWED])
    stage.hub.gateway(ScriptedRouter())
    stage.hub.make_views()
    assert stage.streams({"params": {"name": name, "_meta": meta}}) is streams


def read_bytes(tool: dict[str, Any]) -> int:
    return len(json.dumps({member: tool[member] for member in READ}, separators=(",", ":")))


@pytest.mark.parametrize(
    ("query", "most"),
    [
        pytest.param("", 600, id="dotted"),
        pytest.param("names=dashed", 600, id="dashed"),
        # One entry for a whole fleet: with the members that choose nodes and answers, and how to use them.
        pytest.param("view=kinds", 1900, id="kinds"),
        pytest.param("view=kinds&names=dashed", 1900, id="kinds-dashed"),
    ],
)
async def test_what_a_model_reads_of_each_verb_of_each_kind_is_short(
    stage: Stage, query: str, most: int
) -> None:
    stage.hub.gateway(ScriptedRouter())
    stage.hub.make_views()
    stage.hub.connect(stage.hub.ca.issue(), capabilities=[ECHO, METRICS])
    stage.hub.fleet.rename({NODE_ID: NodeName(TENANT, "x" * 48, ())})
    tools = {tool["_meta"]["edge-kubelet/canonical-name"]: tool for tool in await stage.tools(query)}
    assert {f"{name.split('.')[0]}.{name.split('.')[-1]}" for name in tools if "." in name} == OFFERS
    sizes = {name: read_bytes(tool) for name, tool in tools.items()}
    assert {name: size for name, size in sizes.items() if size > most} == {}


@pytest.fixture
def tool(hub: Hub) -> Tool:
    hub.connect(hub.ca.issue())
    return hub.fleet.selected.listed(Rights(TENANT, frozenset({"read_only"})))[0]


def many(tool: Tool, count: int, size: int) -> list[Tool]:
    rest = tool.listed_bytes - tool.surface.schema_bytes
    surface = replace(tool.surface, schema_bytes=size - rest)
    return [replace(tool, canonical=f"tool.{number:05}", surface=surface) for number in range(count)]


def listed(tools: Sequence[Tool]) -> Listed:
    """Return the list in which ``tools``, which are sorted, are."""
    return lambda after, limit: [tool for tool in tools if tool.place > after][:limit]


@pytest.mark.parametrize(
    ("count", "size", "pages"),
    [
        pytest.param(0, 100, [0], id="none"),
        pytest.param(PAGE_SIZE, 1, [PAGE_SIZE], id="just-one-page"),
        pytest.param(PAGE_SIZE + 1, 1, [PAGE_SIZE, 1], id="one-more"),
        pytest.param(5, MAX_PAGE_BYTES // 2, [2, 2, 1], id="large-ones"),
        pytest.param(2, MAX_PAGE_BYTES * 2, [1, 1], id="larger-than-a-page"),
    ],
)
def test_following_the_cursor_gives_every_tool_once(
    tool: Tool, count: int, size: int, pages: list[int]
) -> None:
    tools = many(tool, count, size)
    seen: list[object] = []
    sizes: list[int] = []
    cursor: str | None = None
    while True:
        page, cursor = page_of(listed(tools), cursor)
        seen += page
        sizes.append(len(page))
        if cursor is None:
            break
    assert seen == tools
    assert sizes == pages


def test_a_cursor_goes_on_behind_its_tool_even_when_that_is_gone(tool: Tool) -> None:
    tools = many(tool, 3, MAX_PAGE_BYTES)
    _, cursor = page_of(listed(tools), None)
    page, _ = page_of(listed(tools[1:]), cursor)
    assert [item.place for item in page] == [(0, "tool.00001")]


def test_pages_follow_the_turns_and_not_the_names_alone(tool: Tool) -> None:
    first, second = (
        [replace(tool, canonical=f"{name}.{number:04}", turn=turn) for name in "ab" for number in range(600)]
        for turn in range(2)
    )
    tools = [*first, *(replace(each, canonical=f"0{each.canonical}") for each in second)]
    assert tools == sorted(tools, key=lambda each: each.place)
    seen: list[object] = []
    cursor: str | None = None
    while cursor is not None or not seen:
        page, cursor = page_of(listed(tools), cursor)
        seen += page
    assert seen == tools


@pytest.mark.parametrize(
    "cursor",
    [
        "!",
        "w6k",
        7,
        ["x"],
        base64url(b"tool.1"),
        base64url(b"1 Tool"),
        base64url(b"1 a\n"),
        base64url(b"x a"),
    ],
    ids=["not base64url", "not ASCII", "number", "list", "name alone", "no name", "a line end", "no turn"],
)
def test_a_cursor_that_was_never_given_is_refused(tool: Tool, cursor: object) -> None:
    with pytest.raises(CursorError, match="not one that this server gave"):
        page_of(listed([tool]), cursor)
