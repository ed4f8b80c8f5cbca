"""The table of methods by itself; that both eras answer from it is for the tests of the endpoint."""

import json
from collections.abc import Mapping
from typing import Any, Final

import pytest

from relay.auth.agent_tokens import Caller
from relay.calls.envelope import Call
from relay.limits.rate_limits import Allowance
from relay.mcp_api.methods import BYTES_LIKE_A_CALL, LIST_TTL_MS, MethodError, Methods
from relay.mcp_api.resources import ResourceCatalog
from relay.mcp_api.tool_list import ToolList
from relay.streams.telemetry.reading import TelemetryResource
from schemas.errors import ToolError
from schemas.projection import META_ERROR
from schemas.times import iso
from tests.fakes.hub import Hub
from tests.fakes.routers import ScriptedRouter
from tests.fakes.seconds import Seconds
from tests.fakes.signer import NODE_ID, NOW_MS

ECHO_NAME: Final = f"sysecho.{NODE_ID}.echo.invoke"
TRACE_ID: Final = "a" * 32
INVALID_PARAMS, INTERNAL_ERROR = -32602, -32603
METHODS: Final = {
    "tools/list",
    "resources/list",
    "resources/templates/list",
    "resources/read",
    "prompts/list",
    "server/discover",
}
CHARGED: Final[Mapping[str, dict[str, Any]]] = {
    "tools/list": {},
    "resources/list": {},
    "resources/read": {"uri": "fleet://nodes"},
}


class Stage:
    """The methods of a relay with one node, and one of its agents."""

    def __init__(self, hub: Hub, per_agent: Allowance) -> None:
        self.hub = hub
        self.router = ScriptedRouter()
        self.token = hub.token(ttl_s=60)
        gateway = hub.gateway(self.router, Seconds(), per_agent)
        resources = ResourceCatalog(hub.fleet, hub.registry, TelemetryResource(hub.telemetry, hub.fleet))
        tools = ToolList(hub.fleet, hub.relay_tools, hub.options)
        self.methods = Methods(
            gateway, tools, hub.authenticator, resources, lambda _rights, _view: {"of": "the SDK"}
        )
        self.principal = hub.authenticator.identify(self.token)
        hub.connect(hub.ca.issue())

    def caller(self, query: str = "", size: int = 0, **headers: str) -> Caller:
        named = {name.encode(): value for name, value in headers.items()}
        return Caller(self.principal, "http", named, query, size)

    async def ask(self, method: str, caller: Caller | None = None, **params: Any) -> dict[str, Any]:
        message = {"jsonrpc": "2.0", "id": 1, "method": method, "params": params}
        caller = caller or self.caller()
        if method == "tools/call":
            return await self.methods.call(
                caller, Call(message, caller.traceparent, caller.correlation_id), None
            )
        return await self.methods.table[method](caller, message, None)

    async def failure(self, method: str, caller: Caller | None = None, **params: Any) -> MethodError:
        with pytest.raises(MethodError) as caught:
            await self.ask(method, caller, **params)
        return caught.value


@pytest.fixture
def stage(hub: Hub) -> Stage:
    return Stage(hub, Allowance(1e6, 1e6, 9))


@pytest.fixture
def narrow(hub: Hub) -> Stage:
    """The agent may make one call, and no further one."""
    return Stage(hub, Allowance(0.001, 1, 9))


def test_the_table_has_each_method_that_has_one_result(stage: Stage) -> None:
    assert stage.methods.table.keys() == METHODS


async def test_a_call_is_the_gateways_and_its_trace_is_the_callers(stage: Stage) -> None:
    caller = stage.caller(traceparent=f"00-{TRACE_ID}-{'b' * 16}-01")
    result = await stage.ask("tools/call", caller, name=ECHO_NAME, arguments={"message": "ping"})
    (command,) = stage.router.commands
    assert (command.traceparent or "").split("-")[1] == TRACE_ID
    assert result["isError"] is False
    assert result["structuredContent"] == {"message": "ping", "received_at_ms": NOW_MS, "node_id": NODE_ID}
    # The text is what a model reads; the structured content has to fit the schema that the node signed.
    text = json.loads(result["content"][0]["text"])
    assert text == {**result["structuredContent"], "received_at": iso(NOW_MS)}


async def test_a_call_that_fails_is_a_result_whose_error_is_not_structured_content(stage: Stage) -> None:
    result = await stage.ask("tools/call", name="no.such.tool.here", arguments={})
    assert result["isError"] is True
    assert "structuredContent" not in result
    assert result["_meta"][META_ERROR] == json.loads(result["content"][0]["text"])


async def test_a_call_under_a_token_that_has_expired_since_is_denied_by_the_gateway(stage: Stage) -> None:
    stage.hub.clock.advance(60_000)
    result = await stage.ask("tools/call", name=ECHO_NAME, arguments={"message": "ping"})
    assert result["_meta"][META_ERROR]["code"] == "E_SAFETY_DENIED"
    assert stage.router.commands == []


@pytest.mark.parametrize(("query", "separator"), [("", "."), ("names=dotted", "."), ("names=dashed", "-")])
async def test_tools_are_listed_by_the_names_that_the_url_asks_for(
    stage: Stage, query: str, separator: str
) -> None:
    result = await stage.ask("tools/list", stage.caller(query))
    tools = json.loads(result["tools"].text())
    assert {tool["name"].split(separator)[1] for tool in tools} == {NODE_ID}
    assert tools == result["tools"].document()
    assert (result["ttlMs"], result["cacheScope"]) == (LIST_TTL_MS, "private")
    assert "nextCursor" not in result


@pytest.mark.parametrize("query", ["names=", "names=dotted&names=x", "names=DASHED"])
async def test_another_form_of_names_is_refused_and_not_repeated(stage: Stage, query: str) -> None:
    error = await stage.failure("tools/list", stage.caller(query))
    assert (error.code, error.message) == (
        INVALID_PARAMS,
        "names must be dotted or dashed, and be given once, by path or query",
    )


async def test_a_resource_with_another_query_is_an_error_that_says_what_is_allowed(stage: Stage) -> None:
    error = await stage.failure("resources/read", uri="fleet://changes?since_ms=-1")
    assert (error.code, error.message) == (
        INVALID_PARAMS,
        "since_ms must be a time in milliseconds since 1970, 0 or more",
    )
    assert error.data == {"uri": "fleet://changes?since_ms=-1"}


async def test_a_wrong_url_is_refused_at_the_first_request(stage: Stage) -> None:
    error = await stage.failure("server/discover", stage.caller("veiw=kinds"))
    assert (error.code, error.message.endswith("did you mean view?")) == (INVALID_PARAMS, True)


async def test_a_cursor_that_was_not_given_is_refused(stage: Stage) -> None:
    assert (await stage.failure("tools/list", cursor="x")).code == INVALID_PARAMS


async def test_resources_are_listed_and_read(stage: Stage) -> None:
    listed = (await stage.ask("resources/list"))["resources"]
    assert f"node://{NODE_ID}/manifest" in {resource["uri"] for resource in listed}
    assert all(resource.keys() == {"uri", "name", "mimeType", "description"} for resource in listed)
    (content,) = (await stage.ask("resources/read", uri="fleet://nodes"))["contents"]
    assert content["uri"] == "fleet://nodes"
    assert [node["node_id"] for node in json.loads(content["text"])["nodes"]] == [NODE_ID]


async def test_a_resource_that_is_not_there_is_named_without_control_characters(stage: Stage) -> None:
    error = await stage.failure("resources/read", uri="fleet://\x1b[31m")
    assert (error.code, error.message) == (INVALID_PARAMS, "Resource not found")
    assert "\x1b" not in error.data["uri"]


async def test_what_is_the_same_for_all_costs_nothing(narrow: Stage) -> None:
    for _ in range(3):
        assert len((await narrow.ask("resources/templates/list"))["resourceTemplates"]) == 6
        assert (await narrow.ask("prompts/list"))["prompts"] == []
        assert await narrow.ask("server/discover") == {"of": "the SDK"}


@pytest.mark.parametrize(("method", "params"), CHARGED.items())
async def test_reading_counts_towards_the_agents_share(
    narrow: Stage, method: str, params: dict[str, Any]
) -> None:
    error = await narrow.failure(method, **params)  # the result's own size no longer fits
    assert (error.code, error.data["code"]) == (INTERNAL_ERROR, "E_RATE_LIMITED")
    assert error.data["retry_after_ms"] > 0


@pytest.mark.parametrize("ending", ["revoked", "expired"])
@pytest.mark.parametrize(("method", "params"), CHARGED.items())
async def test_nothing_is_read_under_a_token_that_is_no_longer_accepted(
    stage: Stage, method: str, params: dict[str, Any], ending: str
) -> None:
    if ending == "revoked":
        stage.hub.authenticator.revoke(frozenset({stage.principal.jti}))
    else:
        stage.hub.clock.advance(60_000)
    error = await stage.failure(method, **params)
    assert error.code == INVALID_PARAMS
    assert (error.data["code"], error.data["message"]) == ("E_SAFETY_DENIED", "The token is not accepted.")
    assert error.data["suggested_fix"].startswith("Send a new token")


async def test_a_body_is_charged_by_its_size(hub: Hub) -> None:
    stage = Stage(hub, Allowance(0.001, 8, 9))
    stage.methods.charge_size(stage.caller(size=7 * BYTES_LIKE_A_CALL))
    with pytest.raises(ToolError, match="E_RATE_LIMITED"):
        stage.methods.charge_size(stage.caller(size=2 * BYTES_LIKE_A_CALL))
