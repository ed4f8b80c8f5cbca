import asyncio
from collections.abc import Mapping
from typing import Any

import pytest

from relay.calls.gateway import CallGateway
from relay.calls.relay_tools import RelayToolCall, RelayTools
from relay.calls.results import CallAnswer
from relay.limits.rate_limits import Allowance
from schemas.registry import SchemaRegistry
from tests.fakes.callers import call_of
from tests.fakes.gateway_calls import NODE_FREE, parrot, repeated
from tests.fakes.hub import Hub
from tests.fakes.routers import ScriptedRouter
from tests.fakes.signer import NODE_ID

BOUND_S = 30


@pytest.fixture
def gateway(hub: Hub) -> CallGateway:
    return hub.gateway(ScriptedRouter())


async def called(
    hub: Hub,
    gateway: CallGateway,
    name: str = "relay.parrot",
    arguments: object = None,
    scopes: tuple[str, ...] = ("tools:call:read_only",),
    **meta: object,
) -> CallAnswer:
    request = call_of(
        hub.token(scopes), name, {"message": "ping"} if arguments is None else arguments, **meta
    )
    return await gateway.call(request)


def code_of(answer: CallAnswer) -> str:
    assert answer.error is not None
    code: str = answer.error["code"]
    return code


@pytest.mark.parametrize("name", ["relay.parrot", "relay-parrot"])
async def test_a_tool_of_the_relay_is_called_by_either_form_of_its_name(
    hub: Hub, gateway: CallGateway, name: str
) -> None:
    hub.relay_tools.register(parrot(hub.registry))
    answer = await called(hub, gateway, name)
    assert answer.result == NODE_FREE
    decision, outcome = hub.audited()
    assert (decision["tool"], decision["node_id"], decision["decision"]) == ("relay.parrot", None, "allow")
    assert (outcome["tool"], outcome["outcome"], outcome["code"]) == ("relay.parrot", "ok", "ok")
    assert outcome["correlation_id"] == decision["correlation_id"]


async def test_a_tool_gets_its_caller_its_arguments_and_the_id_in_the_audit(
    hub: Hub, gateway: CallGateway
) -> None:
    calls: list[RelayToolCall] = []

    async def noting(call: RelayToolCall) -> Mapping[str, Any]:
        calls.append(call)
        return await repeated(call)

    hub.relay_tools.register(parrot(hub.registry, noting))
    await called(hub, gateway)
    (call,) = calls
    assert (call.caller.principal.sub, call.arguments) == ("agent-1", {"message": "ping"})
    assert call.correlation_id == hub.audited()[0]["correlation_id"]


@pytest.mark.parametrize(
    ("arguments", "scopes", "code"),
    [
        pytest.param({"message": "\x1b"}, ("tools:call:read_only",), "E_MANIFEST_INVALID", id="arguments"),
        pytest.param({}, ("tools:call:read_only",), "E_MANIFEST_INVALID", id="none"),
        pytest.param({"message": "ping"}, ("sessions:message",), "E_SAFETY_DENIED", id="scope"),
    ],
)
async def test_a_call_that_is_denied_is_recorded_and_not_made(
    hub: Hub, gateway: CallGateway, arguments: object, scopes: tuple[str, ...], code: str
) -> None:
    async def unreached(_call: RelayToolCall) -> Mapping[str, Any]:
        raise AssertionError

    hub.relay_tools.register(parrot(hub.registry, unreached))
    assert code_of(await called(hub, gateway, arguments=arguments, scopes=scopes)) == code
    (line,) = hub.audited()
    assert (line["decision"], line["code"]) == ("deny", code)


async def test_a_call_counts_towards_the_agents_limit(hub: Hub) -> None:
    gateway = hub.gateway(ScriptedRouter(), per_agent=Allowance(0.001, 1, 9))
    hub.relay_tools.register(parrot(hub.registry))
    token = hub.token()
    request = call_of(token, "relay.parrot", {"message": "ping"})
    assert (await gateway.call(request)).error is None
    assert code_of(await gateway.call(request)) == "E_RATE_LIMITED"


async def test_a_tool_that_takes_longer_than_its_timeout_ends_as_a_deadline(
    hub: Hub, gateway: CallGateway
) -> None:
    async def endless(_call: RelayToolCall) -> Mapping[str, Any]:
        await asyncio.Event().wait()
        raise AssertionError

    hub.relay_tools.register(parrot(hub.registry, endless, timeout_s=0.01))
    answer = await asyncio.wait_for(called(hub, gateway), BOUND_S)
    assert code_of(answer) == "E_DEADLINE_EXCEEDED"
    assert hub.audited()[-1]["code"] == "E_DEADLINE_EXCEEDED"


async def test_a_timeout_within_a_tool_is_its_bug_and_not_the_deadline(
    hub: Hub, gateway: CallGateway
) -> None:
    async def failing(_call: RelayToolCall) -> Mapping[str, Any]:
        raise TimeoutError

    hub.relay_tools.register(parrot(hub.registry, failing))
    assert code_of(await called(hub, gateway)) == "E_INTERNAL"
    assert hub.lines.entries("call failed")


async def test_a_result_that_does_not_fit_is_not_passed_on(hub: Hub, gateway: CallGateway) -> None:
    async def wrong(_call: RelayToolCall) -> Mapping[str, Any]:
        return {"message": 1}

    hub.relay_tools.register(parrot(hub.registry, wrong))
    assert code_of(await called(hub, gateway)) == "E_INTERNAL"


async def test_a_call_ends_when_its_token_is_revoked(hub: Hub, gateway: CallGateway) -> None:
    begun = asyncio.Event()

    async def endless(_call: RelayToolCall) -> Mapping[str, Any]:
        begun.set()
        await asyncio.Event().wait()
        raise AssertionError

    hub.relay_tools.register(parrot(hub.registry, endless))
    request = call_of(hub.token(), "relay.parrot", {"message": "ping"})
    call = asyncio.create_task(gateway.call(request))
    await asyncio.wait_for(begun.wait(), BOUND_S)
    gateway.revoke({request.caller.principal.jti})
    assert code_of(await asyncio.wait_for(call, BOUND_S)) == "E_SAFETY_DENIED"


async def test_a_keyed_call_is_made_once(hub: Hub, gateway: CallGateway) -> None:
    times = 0

    async def counting(call: RelayToolCall) -> Mapping[str, Any]:
        nonlocal times
        times += 1
        return await repeated(call)

    hub.relay_tools.register(parrot(hub.registry, counting, idempotent=False))
    for _ in range(2):
        assert (await called(hub, gateway, edge_kubelet__idempotency_key="k")).result == NODE_FREE
    assert times == 1


@pytest.mark.parametrize("name", ["relay.parrot", "relay-parrot", f"sysecho.{NODE_ID}.echo.invoke"])
def test_a_name_is_registered_once_and_is_never_that_of_a_nodes_tool(
    registry: SchemaRegistry, name: str
) -> None:
    tools = RelayTools()
    tools.register(parrot(registry))
    with pytest.raises(ValueError, match="cannot be the name"):
        tools.register(parrot(registry, canonical=name))
    assert [tool.canonical for tool in tools] == ["relay.parrot"]
