"""Calls that carry an idempotency key: each is made once, for the caller and the tool that its key is of."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from relay.calls.call_record import CallRecord
from relay.limits.rate_limits import Limiter
from relay.routing.port import Command
from relay.settings.config import PER_AGENT
from schemas.errors import ToolError
from tests.fakes.keyed_calls import (
    ECHO_NAME,
    METRICS_NAME,
    PING,
    PONG,
    WIDE_ECHO,
    Stage,
    answering,
    code,
    error_of,
)
from tests.fakes.routers import HeldRouter, ScriptedRouter, echoed
from tests.fakes.signer import NODE_ID, OTHER_NODE_ID

# --- once -----------------------------------------------------------------------------------------------


async def test_a_call_that_comes_again_gets_the_outcome_of_the_first_without_a_second_command(
    stage: Stage, router: ScriptedRouter
) -> None:
    first, second = await stage.call(), await stage.call()
    assert first.result == second.result
    assert first.text == second.text
    assert len(router.commands) == 1
    assert stage.decisions() == [
        ("allow", "ok", False),
        ("ok", "ok", False),
        ("allow", "ok", True),
        ("ok", "ok", True),
    ]
    assert len({line["correlation_id"] for line in stage.hub.audited()}) == 2
    assert stage.attempts() == [1, 1]


async def test_without_a_key_every_call_is_made(stage: Stage, router: ScriptedRouter) -> None:
    for _ in range(3):
        assert code(await stage.call(None)) == "ok"
    assert len(router.commands) == 3
    assert all("first" not in line for line in stage.hub.audited())


@pytest.mark.parametrize(
    "answer",
    [
        pytest.param(answering("E_INTERNAL"), id="an error of the node"),
        pytest.param(answering("E_VERB_UNSUPPORTED"), id="a refusal of the node"),
        pytest.param(lambda _: {"ok": True, "result": {}}, id="a result that does not fit"),
    ],
)
async def test_an_error_that_the_node_answered_with_is_an_outcome_too(
    stage: Stage, router: ScriptedRouter, answer: Callable[[Command], dict[str, Any]]
) -> None:
    router.answer = answer
    answers = [await stage.call() for _ in range(3)]
    assert len({str(error_of(each)) for each in answers}) == 1
    assert len({each.error["correlation_id"] for each in answers if each.error}) == 3
    assert len(router.commands) == 1
    assert [decision[1:] for decision in stage.decisions()[1::2]] == [
        (code(answers[0]), False),
        (code(answers[0]), True),
        (code(answers[0]), True),
    ]


async def test_what_is_told_again_does_not_keep_alive_where_it_was_told_before(
    stage: Stage, router: ScriptedRouter
) -> None:
    router.answer = answering("E_INTERNAL")
    tool = stage.hub.fleet.resolve(ECHO_NAME, stage.hub.authenticator.identify(stage.token).rights)
    await stage.call()
    # What is kept shows nowhere else.
    keyed_calls = list(stage.hub.idempotent_calls._store._keyed_calls.values())  # noqa: SLF001 - as above
    for _ in range(3):
        await stage.call()
        (keyed,) = keyed_calls
        assert isinstance(keyed.outcome, ToolError)
        assert keyed.outcome.__traceback__ is None
    assert tool.canonical == ECHO_NAME


async def test_both_names_of_a_tool_are_one_tool(stage: Stage, router: ScriptedRouter) -> None:
    await stage.call()
    assert code(await stage.call(name=ECHO_NAME.replace(".", "-"))) == "ok"
    assert len(router.commands) == 1


async def test_an_agent_is_the_same_with_another_token(stage: Stage, router: ScriptedRouter) -> None:
    await stage.call()
    assert code(await stage.call(token=stage.hub.token(ttl_s=60))) == "ok"
    assert len(router.commands) == 1


EMPTY: list[object] = [{}, None]


async def test_no_arguments_are_the_same_however_they_are_said(stage: Stage, router: ScriptedRouter) -> None:
    sample = {"ts_ms": 1_760_000_000_000, "node_id": NODE_ID, "uptime_s": 1}
    router.answer = lambda _: {"ok": True, "result": sample}
    for said in EMPTY:
        assert code(await stage.call("k", said, METRICS_NAME)) == "ok"
    assert len(router.commands) == 1


# --- whose key it is ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "other",
    [
        pytest.param({"key": "l"}, id="another key"),
        pytest.param({"name": ECHO_NAME.replace(".echo.", ".echo2.")}, id="another tool of the node"),
        pytest.param({"sub": "agent-2"}, id="another principal"),
    ],
)
async def test_a_key_counts_for_one_principal_and_one_tool(
    stage: Stage, router: ScriptedRouter, other: dict[str, Any]
) -> None:
    await stage.call()
    sub = other.pop("sub", "agent-1")
    assert code(await stage.call(token=stage.hub.token(sub=sub), **other)) == "ok"
    assert len(router.commands) == 2


async def test_a_key_counts_for_one_tenant(stage: Stage, router: ScriptedRouter) -> None:
    stage.hub.connect(stage.hub.ca.issue(OTHER_NODE_ID, "globex"), capabilities=[WIDE_ECHO])
    theirs = {"token": stage.hub.token(tenant="globex"), "name": ECHO_NAME.replace(NODE_ID, OTHER_NODE_ID)}
    assert [code(await stage.call()), code(await stage.call(arguments=PONG, **theirs))] == ["ok", "ok"]
    assert [command.node_id for command in router.commands] == [NODE_ID, OTHER_NODE_ID]


@pytest.mark.parametrize(
    "other", [{"tenant": "globex"}, {"issuer": "https://login.example"}, {"sub": "agent-2"}], ids=str
)
async def test_every_part_of_who_calls_counts_even_where_the_tool_is_the_same(
    stage: Stage, router: ScriptedRouter, other: dict[str, Any]
) -> None:
    who = stage.hub.authenticator.identify(stage.token)
    tool = stage.hub.fleet.resolve(ECHO_NAME, who.rights)
    for principal in (who, replace(who, **other), who):
        record = CallRecord(stage.hub.ulids.new(), stage.request().call, stage.seconds())
        assert (
            await stage.hub.idempotent_calls.run("k", tool, principal, record, Limiter(PER_AGENT, 0.0))
        ).error is None
    assert len(router.commands) == 2


OTHER_CALLERS = [
    pytest.param({"tenant": "globex"}, id="of another tenant"),
    pytest.param({"scopes": ["tools:call:reversible"]}, id="without the scope"),
    pytest.param({"tenant": "globex", "sub": "agent-2"}, id="of another tenant and name"),
]


@pytest.mark.parametrize("other_caller", OTHER_CALLERS)
async def test_who_may_not_call_learns_nothing_of_a_key(
    stage: Stage, router: ScriptedRouter, other_caller: dict[str, Any]
) -> None:
    token = stage.hub.token(**other_caller)
    before = error_of(await stage.call(token=token))
    await stage.call()
    for arguments in (PING, PONG):
        assert error_of(await stage.call(arguments=arguments, token=token)) == before
    assert before["code"] == "E_SAFETY_DENIED"
    assert len(router.commands) == 1


@pytest.mark.parametrize("other_caller", OTHER_CALLERS)
async def test_who_may_not_call_takes_no_key(
    stage: Stage, router: ScriptedRouter, other_caller: dict[str, Any]
) -> None:
    await stage.call(token=stage.hub.token(**other_caller))
    await stage.call(arguments={})
    assert code(await stage.call(arguments=PONG)) == "ok"
    assert len(router.commands) == 1


async def test_who_joins_a_call_is_asked_for_its_rights_as_well(waiting: Stage, held: HeldRouter) -> None:
    first = waiting.begin()
    command, answer = await held.next()
    for denied in ({"tenant": "globex"}, {"scopes": ["tools:call:reversible"]}):
        assert code(await waiting.call(token=waiting.hub.token(**denied))) == "E_SAFETY_DENIED"
    answer.set_result(echoed(command))
    assert code(await first) == "ok"


async def test_a_token_that_was_revoked_gets_no_outcome(stage: Stage) -> None:
    await stage.call()
    stage.hub.authenticator.revoke(frozenset({stage.jti(stage.token)}))
    assert code(await stage.call()) == "E_SAFETY_DENIED"
    assert code(await stage.call(token=stage.hub.token())) == "ok"


async def test_other_arguments_under_the_same_key_are_refused_and_change_nothing(
    stage: Stage, router: ScriptedRouter
) -> None:
    await stage.call()
    refused = error_of(await stage.call(arguments=PONG))
    assert refused["code"] == "E_MANIFEST_INVALID"
    assert refused["message"] == "The idempotency key was used for other arguments of this tool."
    line = stage.hub.audited()[-1]
    assert (line["decision"], line["code"]) == ("deny", "E_MANIFEST_INVALID")
    assert code(await stage.call()) == "ok"
    assert [command.arguments for command in router.commands] == [PING]
