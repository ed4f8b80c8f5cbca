"""How often an agent may call, how much at once, and what counts as a call."""

import asyncio
import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from relay.auth.agent_tokens import Principal
from relay.calls.gateway import CallGateway
from relay.calls.results import CallAnswer
from relay.limits.rate_limits import Allowance
from relay.routing.port import CommandAnswer, LocalRouter
from relay.settings.config import EnvelopeMode
from schemas.errors import Failure, ToolError
from schemas.kinds import MANIFEST_REF, KindRegistry
from schemas.registry import SchemaRegistry
from tests.fakes.gateway_calls import ECHO_NAME, audited, begun, codes, error, request
from tests.fakes.hub import Hub
from tests.fakes.refusals import audited_refusals, refusal
from tests.fakes.routers import HeldRouter, ScriptedRouter
from tests.fakes.seconds import Seconds
from tests.fakes.shipped_kinds import KINDS
from tests.fakes.signer import ECHO, NODE_ID, OTHER_NODE_ID, TENANT
from tests.fakes.suite_kinds import write_documents

SLOW_ECHO = {**ECHO, "constraints": {"rate_limit_rps": 0.5, "max_concurrency": 1}}
BRISK_ECHO = {**ECHO, "constraints": {"rate_limit_rps": 50, "max_concurrency": 2}}


def slowed(hub: Hub, router: LocalRouter, seconds: Seconds, *capabilities: Mapping[str, Any]) -> CallGateway:
    hub.connect(hub.ca.issue(), capabilities=list(capabilities))
    return hub.gateway(router, seconds)


def limited(hub: Hub, router: LocalRouter, seconds: Seconds, per_agent: Allowance) -> CallGateway:
    hub.connect(hub.ca.issue())
    return hub.gateway(router, seconds, per_agent)


@pytest.mark.holds("RFC-0005/8/rate-limit")
async def test_a_capability_that_is_called_too_often_says_when_to_come_again(
    hub: Hub, router: ScriptedRouter, seconds: Seconds
) -> None:
    gateway = slowed(hub, router, seconds, SLOW_ECHO)
    assert (await gateway.call(request(hub))).error is None
    seconds.now += 0.5
    envelope = error(await gateway.call(request(hub)))
    assert (envelope["code"], envelope["retry_after_ms"]) == ("E_RATE_LIMITED", 1500)
    assert hub.registry.load("error@1.0.0").is_valid(envelope)
    assert audited(hub, "decision", "outcome", "code") == [
        ("allow", None, "ok"),
        (None, "ok", "ok"),
        ("allow", None, "ok"),
        (None, "error", "E_RATE_LIMITED"),
    ]
    assert len(router.commands) == 1
    seconds.now += 1.5
    assert (await gateway.call(request(hub))).error is None


async def test_a_capability_of_next_to_no_rate_is_told_as_a_day_and_breaks_nothing(
    hub: Hub, router: ScriptedRouter, seconds: Seconds
) -> None:
    never = {**ECHO, "constraints": {"rate_limit_rps": 5e-324}}
    gateway = slowed(hub, router, seconds, never)
    await gateway.call(request(hub))
    assert error(await gateway.call(request(hub)))["retry_after_ms"] == 86_400_000


async def test_all_agents_share_what_a_capability_bears(
    hub: Hub, router: ScriptedRouter, seconds: Seconds
) -> None:
    gateway = slowed(hub, router, seconds, SLOW_ECHO)
    first, second = request(hub, sub="agent-1"), request(hub, sub="agent-2")
    assert await codes(gateway, first, second) == ["ok", "E_RATE_LIMITED"]


@pytest.mark.parametrize("greedy", [40, 200])
async def test_an_agent_that_calls_within_its_share_is_not_refused_beside_one_that_calls_more(
    hub: Hub, router: ScriptedRouter, seconds: Seconds, greedy: int
) -> None:
    gateway = slowed(hub, router, seconds, {**ECHO, "constraints": {"rate_limit_rps": 10}})
    modest, other = request(hub, sub="modest"), request(hub, sub="greedy")
    outcomes, served = list[str](), 0
    for tick in range(10 * greedy):
        served += await codes(gateway, other) == ["ok"]
        if tick % (greedy // 5) == 0:
            outcomes += await codes(gateway, modest)
        seconds.now += 1 / greedy
    assert outcomes == ["ok"] * 50
    assert served == pytest.approx(50, abs=10)  # the rest, and what was left of the burst
    assert len(router.commands) <= 10 * 10 + 10


async def test_capabilities_do_not_share(hub: Hub, router: ScriptedRouter, seconds: Seconds) -> None:
    gateway = slowed(hub, router, seconds, SLOW_ECHO, {**SLOW_ECHO, "cap_id": "echo2"})
    other = ECHO_NAME.replace(".echo.", ".echo2.")
    assert await codes(gateway, request(hub), request(hub, other)) == ["ok", "ok"]
    assert await codes(gateway, request(hub), request(hub, other)) == ["E_RATE_LIMITED"] * 2


async def test_two_verbs_of_one_capability_share(
    tmp_path: Path, router: ScriptedRouter, seconds: Seconds
) -> None:
    echo = next(kind for kind in KINDS if kind.name == "system.echo")
    verb = echo.verbs["invoke"]
    twice = replace(echo, verbs={**echo.verbs, "get": replace(verb, name="get")})
    write_documents(tmp_path / "documents")
    manifest = json.loads((tmp_path / "documents" / f"{MANIFEST_REF}.json").read_text())
    for clamp in manifest["$defs"]["Capability"]["allOf"]:
        if clamp["if"]["properties"]["kind"]["const"] == "system.echo":
            clamp["then"]["properties"]["verbs"]["items"]["enum"] = ["invoke", "get"]
    (tmp_path / "documents" / f"{MANIFEST_REF}.json").write_text(json.dumps(manifest))
    kinds = KindRegistry([*(kind for kind in KINDS if kind != echo), twice])
    hub = Hub(tmp_path, SchemaRegistry(tmp_path / "documents"), kinds=kinds)
    gateway = slowed(hub, router, seconds, {**SLOW_ECHO, "verbs": ["invoke", "get"]})
    calls = [request(hub), request(hub, ECHO_NAME.replace("invoke", "get"))]
    assert await codes(gateway, *calls) == ["ok", "E_RATE_LIMITED"]
    seconds.now += 2
    assert await codes(gateway, *reversed(calls)) == ["ok", "E_RATE_LIMITED"]
    assert [command.tool.rpartition(".")[2] for command in router.commands] == ["invoke", "get"]
    hub.close()


async def test_an_agents_limits_and_the_check_of_envelopes_can_be_changed(
    hub: Hub, router: ScriptedRouter, seconds: Seconds
) -> None:
    gateway = limited(hub, router, seconds, Allowance(0.001, 1, 9))
    assert await codes(gateway, request(hub), request(hub)) == ["ok", "E_RATE_LIMITED"]
    gateway.change(Allowance(1000, 1000, 9), EnvelopeMode.OFF)
    seconds.now += 1
    assert await codes(gateway, *[request(hub)] * 5) == ["ok"] * 5


async def test_a_refusal_uses_up_nothing_of_the_capability(
    hub: Hub, router: ScriptedRouter, seconds: Seconds
) -> None:
    gateway = slowed(hub, router, seconds, SLOW_ECHO)
    refused = [
        request(hub, arguments={}),
        request(hub, scopes=["tools:call:reversible"]),
        request(hub, tenant="globex"),
        request(hub, ECHO_NAME.replace("invoke", "get")),
    ]
    assert "ok" not in await codes(gateway, *refused)
    assert await codes(gateway, request(hub)) == ["ok"]


async def test_a_stranger_learns_nothing_from_a_capability_that_is_busy(
    hub: Hub, router: ScriptedRouter, seconds: Seconds
) -> None:
    gateway = slowed(hub, router, seconds, SLOW_ECHO)
    await gateway.call(request(hub))
    assert await codes(gateway, request(hub, tenant="globex"), request(hub)) == [
        "E_SAFETY_DENIED",
        "E_RATE_LIMITED",
    ]


@pytest.mark.holds("RFC-0001/2/max-concurrency")
async def test_no_more_calls_are_under_way_than_the_capability_bears(hub: Hub, seconds: Seconds) -> None:
    router = HeldRouter()
    gateway = slowed(hub, router, seconds, BRISK_ECHO)
    (first, answer_first), (second, answer_second) = [
        await begun(gateway, router, request(hub, sub=sub)) for sub in ("agent-1", "agent-2")
    ]
    envelope = error(await gateway.call(request(hub, sub="agent-3")))
    assert (envelope["code"], envelope["retry_after_ms"]) == ("E_RATE_LIMITED", 100)
    answer_first()
    assert (await first).error is None
    third, answer_third = await begun(gateway, router, request(hub, sub="agent-3"))
    for answer in (answer_second, answer_third):
        answer()
    assert [(await each).error for each in (second, third)] == [None, None]


def fails(answer: CommandAnswer, *_: Any) -> None:
    answer.set_exception(ToolError(Failure.NODE_OFFLINE))


def breaks(answer: CommandAnswer, *_: Any) -> None:
    answer.set_exception(ZeroDivisionError())


def misfits(answer: CommandAnswer, *_: Any) -> None:
    answer.set_result({"ok": True, "result": {}})


def gives_up(_: Any, task: asyncio.Task[CallAnswer], __: Any) -> None:
    task.cancel()


def revokes(_: Any, __: Any, revoke: Callable[[], None]) -> None:
    revoke()


@pytest.mark.parametrize("ending", [fails, breaks, misfits, gives_up, revokes])
async def test_every_way_out_of_a_call_leaves_the_gates(
    hub: Hub, seconds: Seconds, ending: Callable[..., None]
) -> None:
    router = HeldRouter()
    one_at_a_time = {**ECHO, "constraints": {"rate_limit_rps": 50, "max_concurrency": 1}}
    hub.connect(hub.ca.issue(), capabilities=[one_at_a_time])
    gateway = hub.gateway(router, seconds, Allowance(1000, 1000, 1))
    call = request(hub)
    task = asyncio.create_task(gateway.call(call))
    _, answer = await router.next()
    assert await codes(gateway, request(hub), request(hub, sub="agent-2")) == ["E_RATE_LIMITED"] * 2
    ending(answer, task, lambda: gateway.revoke({call.caller.principal.jti}))
    await asyncio.wait([task], timeout=10)
    again, answer_again = await begun(gateway, router, request(hub))
    answer_again()
    assert (await again).error is None


@pytest.mark.parametrize(
    "call",
    [
        pytest.param({"name": "echo"}, id="no such tool"),
        pytest.param({"arguments": {}}, id="no arguments"),
        pytest.param({"tenant": "globex"}, id="not for them"),
    ],
)
async def test_a_refused_call_leaves_the_agents_gate(
    hub: Hub, router: ScriptedRouter, seconds: Seconds, call: dict[str, Any]
) -> None:
    gateway = limited(hub, router, seconds, Allowance(1000, 1000, 1))
    first = await codes(gateway, request(hub, **call))
    assert first != ["E_RATE_LIMITED"]
    assert await codes(gateway, request(hub, **call)) == first


async def test_an_agent_that_calls_too_often_is_counted_in_the_audit_and_not_written_down_each_time(
    hub: Hub, router: ScriptedRouter, seconds: Seconds
) -> None:
    gateway = limited(hub, router, seconds, Allowance(2, 2, 9))
    assert await codes(gateway, request(hub), request(hub)) == ["ok", "ok"]
    written = len(hub.audited())
    for _ in range(50):
        envelope = error(await gateway.call(request(hub)))
        assert (envelope["code"], envelope["retry_after_ms"]) == ("E_RATE_LIMITED", 500)
    assert len(hub.audited()) == written
    assert audited_refusals(hub) == [refusal("call_refused", f"{TENANT}/agent-1", "E_RATE_LIMITED", 50)]
    assert hub.counted("calls_total", code="E_RATE_LIMITED") == 50


async def test_an_agent_has_one_share_whatever_tokens_it_holds_and_the_others_have_theirs(
    hub: Hub, router: ScriptedRouter, seconds: Seconds
) -> None:
    hub.connect(hub.ca.issue(OTHER_NODE_ID, "globex"))
    gateway = limited(hub, router, seconds, Allowance(1, 1, 9))
    assert await codes(gateway, request(hub), request(hub)) == ["ok", "E_RATE_LIMITED"]
    theirs = ECHO_NAME.replace(NODE_ID, OTHER_NODE_ID)
    others = [request(hub, sub="agent-2"), request(hub, theirs, tenant="globex")]
    assert await codes(gateway, *others) == ["ok", "ok"]
    seconds.now += 1
    assert await codes(gateway, request(hub), *others) == ["ok", "ok", "ok"]


async def test_an_agents_calls_at_a_time_are_bounded_without_touching_anothers(
    hub: Hub, held: HeldRouter, seconds: Seconds
) -> None:
    gateway = limited(hub, held, seconds, Allowance(1000, 1000, 2))
    calls = [await begun(gateway, held, request(hub)) for _ in range(2)]
    assert await codes(gateway, request(hub)) == ["E_RATE_LIMITED"]
    calls.append(await begun(gateway, held, request(hub, sub="agent-2")))
    for task, answer in calls:
        answer()
        assert (await task).error is None


def charged(gateway: CallGateway, who: Principal, cost: float) -> int | None:
    """Return when to come again, or None."""
    try:
        gateway.charge(who, cost)
    except ToolError as refused:
        return refused.retry_after_ms
    return None


async def test_what_is_charged_counts_towards_the_share_and_is_counted_when_refused(
    hub: Hub, router: ScriptedRouter, seconds: Seconds
) -> None:
    gateway = limited(hub, router, seconds, Allowance(10, 10, 1))
    who = hub.authenticator.identify(hub.token())
    assert charged(gateway, who, 9.5) is None
    assert error(await gateway.call(request(hub)))["retry_after_ms"] == 50
    assert charged(gateway, who, 2) == 150
    assert audited_refusals(hub) == [refusal("call_refused", f"{TENANT}/agent-1", "E_RATE_LIMITED", 2)]
    assert await codes(gateway, request(hub, sub="agent-2")) == ["ok"]


async def test_what_is_charged_does_not_wait_for_the_agents_calls(
    hub: Hub, held: HeldRouter, seconds: Seconds
) -> None:
    gateway = limited(hub, held, seconds, Allowance(10, 10, 1))
    task, answer = await begun(gateway, held, request(hub))
    who = hub.authenticator.identify(hub.token())
    assert charged(gateway, who, 9) is None
    assert charged(gateway, who, 1) == 100
    assert await codes(gateway, request(hub)) == ["E_RATE_LIMITED"]
    answer()
    assert (await task).error is None


async def test_what_costs_more_than_the_whole_share_takes_the_whole_share(
    hub: Hub, router: ScriptedRouter, seconds: Seconds
) -> None:
    gateway = hub.gateway(router, seconds, Allowance(10, 10, 1))
    who = hub.authenticator.identify(hub.token())
    assert charged(gateway, who, 1000) is None
    assert charged(gateway, who, 1000) == 1000
    seconds.now += 1
    assert charged(gateway, who, 1000) is None
