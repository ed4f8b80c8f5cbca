import json
from typing import Any

import pytest

from kubelet.handlers.echo import CAPABILITY as ECHO
from kubelet.handlers.metrics import CAPABILITY as METRICS
from relay.auth.agent_tokens import Caller
from relay.mcp_api.methods import Methods
from relay.mcp_api.resources import ResourceCatalog
from relay.mcp_api.tool_list import ToolList
from relay.settings.config import View
from relay.state.names import NodeName
from relay.streams.telemetry.reading import TelemetryResource
from schemas.kinds import KINDS
from tests.fakes.followed import FOLLOWED, SUBSCRIBE
from tests.fakes.hub import Hub
from tests.fakes.relay_tools import parrot
from tests.fakes.routers import ScriptedRouter
from tests.fakes.signer import NODE_ID, OTHER_NODE_ID, TENANT

READ = ("name", "title", "description", "inputSchema")
OFFERS = {f"{kind.short}.{verb}" for kind in KINDS for verb in kind.verbs}


class Stage:
    def __init__(self, hub: Hub) -> None:
        self.hub = hub
        gateway = hub.gateway(ScriptedRouter())
        resources = ResourceCatalog(hub.fleet, hub.registry, TelemetryResource(hub.telemetry, hub.fleet))
        self.methods = Methods(
            gateway,
            ToolList(hub.fleet, hub.relay_tools, hub.options),
            hub.authenticator,
            resources,
            lambda _rights, _view: {},
        )

    async def page(
        self, query: str = "", cursor: str | None = None, scope: str = "tools:call:read_only"
    ) -> dict[str, Any]:
        principal = self.hub.authenticator.identify(self.hub.token((scope,)))
        message = {"params": {} if cursor is None else {"cursor": cursor}}
        return await self.methods.table["tools/list"](Caller(principal, "http", {}, query), message, None)

    async def tools(self, query: str = "", **of: Any) -> list[dict[str, Any]]:
        tools: list[dict[str, Any]] = json.loads((await self.page(query, **of))["tools"].text())
        return tools

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


@pytest.mark.parametrize("position", range(4))
async def test_pages_hold_each_tool_once_wherever_that_of_the_relay_is(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, position: int
) -> None:
    monkeypatch.setattr("relay.mcp_api.paging.PAGE_SIZE", 1)
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
    assert stage.methods.streams({"params": {"name": name}}) is streams
    assert stage.methods.streams({"params": None}) is False


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
    assert stage.methods.streams({"params": {"name": "relay.parrot", "_meta": meta}}) is streams


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
    stage.hub.views(stage.hub.gateway(ScriptedRouter()))
    assert stage.methods.streams({"params": {"name": name, "_meta": meta}}) is streams


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
    stage.hub.views(stage.hub.gateway(ScriptedRouter()))
    stage.hub.connect(stage.hub.ca.issue(), capabilities=[ECHO, METRICS])
    stage.hub.fleet.rename({NODE_ID: NodeName(TENANT, "x" * 48, ())})
    tools = {tool["_meta"]["edge-kubelet/canonical-name"]: tool for tool in await stage.tools(query)}
    assert {f"{name.split('.')[0]}.{name.split('.')[-1]}" for name in tools if "." in name} == OFFERS
    sizes = {name: read_bytes(tool) for name, tool in tools.items()}
    assert {name: size for name, size in sizes.items() if size > most} == {}
