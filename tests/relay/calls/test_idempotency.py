"""Calls that carry an idempotency key: each is made once, for the caller and the tool that its key is of."""

import asyncio
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from relay.calls.executor import CallRecord
from relay.calls.idempotency import (
    OUTCOME_UNKNOWN,
    QUOTA_OF_ALL,
    QUOTA_OF_CALLER,
    QUOTA_OF_TENANT,
    REMEMBERED_S,
    CallKey,
    IdempotencyStore,
    KeyedCommands,
    Quota,
)
from relay.fleet.selection import WHOLE_FLEET
from relay.limits.rate_limits import PER_AGENT, Limiter
from relay.routing.port import Command, Idempotency, LocalRouter
from relay.settings.config import EnvelopeMode
from schemas.errors import Failure, ToolError
from schemas.payloads import CmdAck
from schemas.registry import SchemaRegistry
from tests.fakes.disk import full_disk
from tests.fakes.hub import Hub
from tests.fakes.keyed_calls import (
    BOUND_S,
    CONSTRAINTS,
    ECHO_NAME,
    MAY_HAVE_RUN,
    METRICS_NAME,
    PING,
    PONG,
    Stage,
    answering,
    breaking,
    code,
    error_of,
    hung_up,
    kinds,
    until_joined,
)
from tests.fakes.polling import until
from tests.fakes.routers import HeldRouter, ScriptedRouter, echoed, refusing
from tests.fakes.seconds import Seconds
from tests.fakes.signer import ECHO, NODE_ID

# --- once -----------------------------------------------------------------------------------------------


@pytest.mark.holds("ENVELOPE/idempotency-key")
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


async def test_a_call_is_the_same_by_another_name_of_its_tool_and_with_another_token_of_its_agent(
    stage: Stage, router: ScriptedRouter
) -> None:
    await stage.call()
    assert code(await stage.call(name=ECHO_NAME.replace(".", "-"))) == "ok"
    assert code(await stage.call(token=stage.hub.token(ttl_s=60))) == "ok"
    assert len(router.commands) == 1
    sample = {"ts_ms": 1_760_000_000_000, "node_id": NODE_ID, "uptime_s": 1}
    router.answer = lambda _: {"ok": True, "result": sample}
    assert code(await stage.call("k", {}, METRICS_NAME)) == "ok"
    assert code(await stage.call("k", None, METRICS_NAME)) == "ok"
    assert len(router.commands) == 2


# --- whose key it is ------------------------------------------------------------------------------------


@pytest.mark.parametrize("other", [{"key": "l"}, {"name": ECHO_NAME.replace(".echo.", ".echo2.")}], ids=str)
async def test_a_key_counts_for_one_tool(stage: Stage, router: ScriptedRouter, other: dict[str, Any]) -> None:
    await stage.call()
    assert code(await stage.call(**other)) == "ok"
    assert len(router.commands) == 2


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
        run = stage.hub.idempotent_calls.run
        answer = await run("k", tool, principal, WHOLE_FLEET, record, Limiter(PER_AGENT, 0.0))
        assert answer.error is None
    assert len(router.commands) == 2


@pytest.mark.holds("ENVELOPE/idempotency-key")
@pytest.mark.parametrize(
    "other_caller",
    [
        pytest.param({"tenant": "globex"}, id="of another tenant"),
        pytest.param({"scopes": ["tools:call:reversible"]}, id="without the scope"),
    ],
)
async def test_who_may_not_call_learns_nothing_of_a_key(
    stage: Stage, router: ScriptedRouter, other_caller: dict[str, Any]
) -> None:
    token = stage.hub.token(**other_caller)
    before = error_of(await stage.call(arguments=PONG, token=token))
    assert code(await stage.call()) == "ok"  # it has taken no key
    for arguments in (PING, PONG):
        assert error_of(await stage.call(arguments=arguments, token=token)) == before
    assert before["code"] == "E_SAFETY_DENIED"
    assert len(router.commands) == 1


async def test_who_joins_a_call_is_asked_for_its_rights_as_well(waiting: Stage, held: HeldRouter) -> None:
    first = waiting.begin()
    command, answer = await held.next()
    for denied in ({"tenant": "globex"}, {"scopes": ["tools:call:reversible"]}):
        assert code(await waiting.call(token=waiting.hub.token(**denied))) == "E_SAFETY_DENIED"
    answer.set_result(echoed(command))
    assert code(await first) == "ok"


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


# --- under way ------------------------------------------------------------------------------------------


async def test_a_call_under_way_is_joined(waiting: Stage, held: HeldRouter) -> None:
    tasks = [waiting.begin() for _ in range(3)]
    command, answer = await held.next()
    await until_joined(waiting, 3)
    answer.set_result(echoed(command))
    answers = await asyncio.gather(*tasks)
    assert [each.result for each in answers] == [echoed(command)["result"]] * 3
    assert held.waiting.empty()
    assert sorted(waiting.decisions()) == sorted(
        [("allow", "ok", False), ("ok", "ok", False), *[("allow", "ok", True), ("ok", "ok", True)] * 2]
    )


@pytest.mark.parametrize("error", [ToolError(Failure.NODE_OFFLINE), ZeroDivisionError()], ids=repr)
async def test_who_joined_gets_the_error_of_the_call_under_its_own_id(
    waiting: Stage, held: HeldRouter, error: Exception
) -> None:
    tasks = [waiting.begin() for _ in range(2)]
    _, answer = await held.next()
    await until_joined(waiting, 2)
    answer.set_exception(error)
    first, second = await asyncio.gather(*tasks)
    assert error_of(first) == error_of(second)
    assert code(first) == ("E_NODE_OFFLINE" if isinstance(error, ToolError) else "E_INTERNAL")
    assert first.error != second.error


async def test_who_joins_waits_no_longer_than_a_call_of_its_own_would(
    single: Hub, held: HeldRouter, seconds: Seconds
) -> None:
    brief = {**ECHO, "constraints": {**CONSTRAINTS, "deadline_ms_default": 50}}
    stage = Stage(single, held, seconds, capability=brief)
    first = stage.begin()
    command, answer = await held.next()
    joined = await asyncio.wait_for(stage.call(), BOUND_S)
    assert error_of(joined)["message"] == Failure.DEADLINE_EXCEEDED.value.message
    assert not first.done()
    answer.set_result(echoed(command))
    assert code(await first) == "ok"


# --- who goes away --------------------------------------------------------------------------------------


async def test_when_the_first_caller_disconnects_the_command_goes_on_and_the_repeat_gets_its_outcome(
    waiting: Stage, held: HeldRouter
) -> None:
    first = waiting.begin()
    command, answer = await held.next()
    await hung_up(first)
    second = waiting.begin()
    await until_joined(waiting, 2)
    assert not answer.cancelled()
    answer.set_result(echoed(command))
    assert (await second).result == echoed(command)["result"]
    assert (await waiting.call()).result == echoed(command)["result"]
    assert held.waiting.empty()
    assert [line["status"] for line in waiting.hub.access_lines.entries()] == [499, 200, 200]


async def test_a_command_whose_callers_have_all_gone_is_recorded_and_remembered(
    waiting: Stage, held: HeldRouter
) -> None:
    tasks = [waiting.begin() for _ in range(2)]
    command, answer = await held.next()
    await until_joined(waiting, 2)
    for task in tasks:
        await hung_up(task)
    answer.set_result(echoed(command))
    await until_joined(waiting, 4)
    assert sorted(waiting.decisions()) == sorted(
        [("allow", "ok", False), ("ok", "ok", False), ("allow", "ok", True), ("error", "cancelled", True)]
    )
    assert code(await waiting.call()) == "ok"
    assert held.waiting.empty()


async def test_an_error_without_a_waiting_caller_is_not_reported_by_the_event_loop(
    waiting: Stage, held: HeldRouter
) -> None:
    alarms: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda _loop, context: alarms.append(context))
    task = waiting.begin()
    _, answer = await held.next()
    await hung_up(task)
    answer.set_exception(ToolError(Failure.NODE_OFFLINE))
    await until_joined(waiting, 2)
    del answer, task
    again = waiting.begin()
    command, answer = await held.next()
    answer.set_result(echoed(command))
    assert code(await again) == "ok"
    assert alarms == []


async def test_a_bug_in_a_call_whose_caller_has_gone_is_logged(waiting: Stage, held: HeldRouter) -> None:
    task = waiting.begin()
    _, answer = await held.next()
    await hung_up(task)
    answer.set_exception(LookupError("planted"))
    line = await waiting.hub.lines.until("call failed")
    assert line["error"] == "LookupError: planted"


async def test_without_a_key_the_command_ends_with_its_caller(waiting: Stage, held: HeldRouter) -> None:
    task = waiting.begin(None)
    _, answer = await held.next()
    await hung_up(task)
    assert answer.cancelled()


async def test_at_the_end_of_the_relay_what_is_under_way_is_ended_and_recorded(
    waiting: Stage, held: HeldRouter
) -> None:
    tasks = [waiting.begin(key) for key in ("a", "b")]
    answers = [(await held.next())[1] for _ in tasks]
    for task in tasks:
        await hung_up(task)
    await waiting.hub.idempotent_calls.end()
    assert all(answer.cancelled() for answer in answers)
    lines = waiting.hub.audited()
    assert [line["code"] for line in lines if "outcome" in line] == ["cancelled"] * 2
    await waiting.hub.idempotent_calls.end()
    assert waiting.hub.audited() == lines


# --- a token that is revoked ----------------------------------------------------------------------------


async def test_who_joined_and_whose_token_is_revoked_is_refused_while_the_call_goes_on(
    waiting: Stage, held: HeldRouter
) -> None:
    theirs = waiting.hub.token()
    first, second = waiting.begin(), waiting.begin(token=theirs)
    command, answer = await held.next()
    await until_joined(waiting, 2)
    waiting.gateway.revoke({waiting.jti(theirs)})
    refused = error_of(await asyncio.wait_for(second, BOUND_S))
    assert (refused["code"], refused["message"]) == (
        "E_SAFETY_DENIED",
        "The token was revoked during the call.",
    )
    assert not answer.cancelled()
    answer.set_result(echoed(command))
    assert code(await first) == "ok"


async def test_when_the_first_callers_token_is_revoked_another_caller_is_told_that_the_outcome_is_unknown(
    waiting: Stage, held: HeldRouter
) -> None:
    theirs = waiting.hub.token()
    first, second = waiting.begin(), waiting.begin(token=theirs)
    _, answer = await held.next()
    await until_joined(waiting, 2)
    waiting.gateway.revoke({waiting.jti(waiting.token)})
    async with asyncio.timeout(BOUND_S):
        assert code(await first) == "E_SAFETY_DENIED"
        joined = error_of(await second)
    assert (joined["code"], joined["message"]) == ("E_DEADLINE_EXCEEDED", MAY_HAVE_RUN)
    assert answer.cancelled()
    assert error_of(await waiting.call(token=theirs)) == joined
    assert held.waiting.empty()


async def test_revoking_the_token_of_a_caller_who_has_gone_ends_its_command(
    waiting: Stage, held: HeldRouter
) -> None:
    first = waiting.begin()
    _, answer = await held.next()
    await hung_up(first)
    waiting.gateway.revoke({waiting.jti(waiting.token)})
    await until_joined(waiting, 2)
    assert answer.cancelled()
    assert waiting.decisions()[-1] == ("error", "E_SAFETY_DENIED", False)


# --- what is not remembered -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "answer",
    [
        pytest.param(refusing(Failure.NODE_OFFLINE), id="the node is offline"),
        pytest.param(answering("E_RATE_LIMITED"), id="the node has too much to do"),
    ],
)
async def test_a_refusal_before_anything_ran_is_not_remembered(
    stage: Stage, router: ScriptedRouter, answer: Callable[[Command], dict[str, Any]]
) -> None:
    router.answer = answer
    assert code(await stage.call()) in {"E_NODE_OFFLINE", "E_RATE_LIMITED"}
    router.answer = echoed
    assert [code(await stage.call(arguments=PONG)), code(await stage.call(arguments=PONG))] == ["ok", "ok"]
    assert len(router.commands) == 2
    assert all("first" not in line for line in stage.hub.audited()[:4])


async def test_a_refusal_of_the_capabilitys_gate_is_not_remembered(
    single: Hub, router: ScriptedRouter, seconds: Seconds
) -> None:
    slow = {**ECHO, "constraints": {"rate_limit_rps": 1, "max_concurrency": 1}}
    stage = Stage(single, router, seconds, capability=slow)
    codes = [code(await stage.call(key)) for key in (None, "k")]
    seconds.now += 1
    codes += [code(await stage.call("k")) for _ in range(2)]
    assert codes == ["ok", "E_RATE_LIMITED", "ok", "ok"]
    assert len(router.commands) == 2


async def test_a_call_that_could_not_be_recorded_is_not_remembered(
    stage: Stage, router: ScriptedRouter
) -> None:
    with full_disk():
        assert code(await stage.call()) == "E_INTERNAL"
    assert router.commands == []
    assert [code(await stage.call()), code(await stage.call())] == ["ok", "ok"]
    assert len(router.commands) == 1


async def test_a_repeat_that_cannot_be_recorded_gets_no_outcome(stage: Stage, router: ScriptedRouter) -> None:
    await stage.call()
    with full_disk(stage.hub.audit_file.stat().st_size):
        assert code(await stage.call()) == "E_INTERNAL"
    assert code(await stage.call()) == "ok"
    assert len(router.commands) == 1


async def test_an_outcome_that_could_not_be_recorded_is_remembered(
    stage: Stage, router: ScriptedRouter
) -> None:
    with ExitStack() as stack:

        def fill_the_disk(command: Command) -> CmdAck:
            stack.enter_context(full_disk(stage.hub.audit_file.stat().st_size))
            return echoed(command)

        router.answer = fill_the_disk
        assert code(await stage.call()) == "ok"
    assert code(await stage.call()) == "ok"
    assert len(router.commands) == 1


# --- an unknown outcome ---------------------------------------------------------------------------------


UNKNOWN = [
    pytest.param(refusing(Failure.DEADLINE_EXCEEDED), id="no answer in time"),
    pytest.param(refusing(Failure.ATTESTATION_FAILED), id="the node was shut out"),
    pytest.param(refusing(Failure.INTERNAL), id="something went wrong on the way"),
    pytest.param(answering("E_DEADLINE_EXCEEDED"), id="the node gave up"),
    pytest.param(breaking, id="a bug"),
]


@pytest.mark.parametrize("answer", UNKNOWN)
async def test_of_a_tool_that_is_not_idempotent_a_call_that_may_have_run_is_never_made_again(
    stage: Stage, router: ScriptedRouter, answer: Callable[[Command], dict[str, Any]]
) -> None:
    router.answer = answer
    assert code(await stage.call()) != "ok"
    router.answer = echoed
    for _ in range(2):
        again = error_of(await stage.call())
        assert (again["code"], again["message"]) == ("E_DEADLINE_EXCEEDED", MAY_HAVE_RUN)
    assert code(await stage.call(arguments=PONG)) == "E_MANIFEST_INVALID"
    assert len(router.commands) == 1
    assert ("error", "E_DEADLINE_EXCEEDED", True) in stage.decisions()


@pytest.mark.parametrize("answer", UNKNOWN)
async def test_of_an_idempotent_tool_a_call_that_may_have_run_is_made_again(
    hub: Hub, router: ScriptedRouter, seconds: Seconds, answer: Callable[[Command], dict[str, Any]]
) -> None:
    stage = Stage(hub, router, seconds)
    router.answer = answer
    assert code(await stage.call()) != "ok"
    router.answer = echoed
    assert [code(await stage.call()) for _ in range(3)] == ["ok"] * 3
    assert len(router.commands) == 2
    assert stage.attempts() == [1, 2, 2, 2]
    assert [repeats for _, _, repeats in stage.decisions()] == [False] * 4 + [True] * 4


async def test_what_may_have_run_stays_so_when_it_cannot_be_sent_again(
    hub: Hub, router: ScriptedRouter, seconds: Seconds
) -> None:
    stage = Stage(hub, router, seconds)
    codes = []
    for failure in (Failure.DEADLINE_EXCEEDED, Failure.NODE_OFFLINE):
        router.answer = refusing(failure)
        codes.append(code(await stage.call()))
    with full_disk(stage.hub.audit_file.stat().st_size):
        codes.append(code(await stage.call()))
    router.answer = echoed
    codes += [code(await stage.call(arguments=arguments)) for arguments in (PONG, PING)]
    assert codes == ["E_DEADLINE_EXCEEDED", "E_NODE_OFFLINE", "E_INTERNAL", "E_MANIFEST_INVALID", "ok"]
    assert stage.attempts() == [1, 2, 3, 1, 4]


# --- ten minutes, and room ------------------------------------------------------------------------------


@pytest.mark.holds("ENVELOPE/idempotency-key")
@pytest.mark.parametrize("idempotent", [True, False])
async def test_a_key_counts_for_ten_minutes(
    tmp_path: Path, registry: SchemaRegistry, router: ScriptedRouter, seconds: Seconds, *, idempotent: bool
) -> None:
    hub = Hub(tmp_path, registry, kinds=kinds(idempotent=idempotent))
    stage = Stage(hub, router, seconds)
    await stage.call()
    seconds.now += 599.9
    assert code(await stage.call()) == "ok"
    assert len(router.commands) == 1
    seconds.now += 0.1
    assert code(await stage.call(arguments=PONG)) == "ok"
    assert [command.arguments for command in router.commands] == [PING, PONG]
    hub.close()


async def test_when_there_is_no_room_a_new_key_is_refused_and_every_live_one_answered(
    single: Hub, router: ScriptedRouter, seconds: Seconds
) -> None:
    stage = Stage(single, router, seconds, max_keys=2)
    for key in ("a", "b"):
        assert code(await stage.call(key)) == "ok"
    refused = error_of(await stage.call("c"))
    assert (refused["code"], refused["retry_after_ms"]) == ("E_RATE_LIMITED", 600_000)
    line = single.audited()[-1]
    assert (line["decision"], line["code"]) == ("deny", "E_RATE_LIMITED")
    assert [code(await stage.call(key)) for key in ("a", "b", None)] == ["ok"] * 3
    assert len(router.commands) == 3
    seconds.now += 600
    assert code(await stage.call("c")) == "ok"


async def test_a_key_that_could_not_be_used_takes_no_room(
    single: Hub, router: ScriptedRouter, seconds: Seconds
) -> None:
    stage = Stage(single, router, seconds, max_keys=1)
    router.answer = refusing(Failure.NODE_OFFLINE)
    assert [code(await stage.call(key)) for key in "abc"] == ["E_NODE_OFFLINE"] * 3
    router.answer = echoed
    assert code(await stage.call("d")) == "ok"


@pytest.mark.parametrize("keys", [("k" * 100_000, "k" * 99_999 + "l"), ("\ud800", "\ud801")])
async def test_where_the_form_is_not_enforced_a_key_of_any_kind_counts(
    single: Hub, router: ScriptedRouter, seconds: Seconds, keys: tuple[str, str]
) -> None:
    stage = Stage(single, router, seconds, mode=EnvelopeMode.OFF)
    assert [code(await stage.call(key)) for key in (*keys, *keys)] == ["ok"] * 4
    assert len(router.commands) == 2


WHO = ("https://relay.example", "acme", "agent-1")

TOOL = "sysecho.01hzx9k3m4p7q8r9s0t1v2w3xy.echo.invoke"

ARGUMENTS, OTHER_ARGUMENTS = "a" * 64, "b" * 64


def place(key: str = "k", who: tuple[str, str, str] = WHO, tool: str = TOOL) -> CallKey:
    return who, tool, key


@pytest.fixture
def store(seconds: Seconds) -> IdempotencyStore[str]:
    return IdempotencyStore(seconds, of_all=Quota(3, 100))


def refused(store: IdempotencyStore[str], key: CallKey, arguments: str = ARGUMENTS) -> ToolError:
    with pytest.raises(ToolError) as caught:
        store.open(key, arguments, "late")
    return caught.value


async def hanging() -> str:
    await asyncio.Event().wait()
    return "never"


# --- full -----------------------------------------------------------------------------------------------


def filled(store: IdempotencyStore[str], seconds: Seconds) -> None:
    """Fill the store with three keys, ten seconds apart."""
    for number in range(3):
        store.open(place(f"key {number}"), ARGUMENTS, f"call {number}")
        seconds.now += 10


def test_there_is_room_for_ten_thousand_keys_and_no_more(seconds: Seconds) -> None:
    store = IdempotencyStore[str](seconds)
    for number in range(QUOTA_OF_ALL.keys):
        tenant, agent = f"tenant-{number // QUOTA_OF_TENANT.keys}", f"agent-{number // QUOTA_OF_CALLER.keys}"
        store.open(place(str(number), ("iss", tenant, agent)), ARGUMENTS, "first")
    assert QUOTA_OF_ALL.keys == len(store) == 10_000
    assert refused(store, place("one more")).failure is Failure.RATE_LIMITED
    assert len(store) == QUOTA_OF_ALL.keys


def test_one_caller_cannot_take_the_room_of_all(seconds: Seconds) -> None:
    store = IdempotencyStore[str](seconds, of_caller=Quota(2, 100))
    store.open(place("first"), ARGUMENTS, "first")
    seconds.now += 10
    store.open(place("second"), ARGUMENTS, "second")
    error = refused(store, place("third"))
    assert (error.failure, error.retry_after_ms) == (Failure.RATE_LIMITED, 590_000)
    store.open(place("third", ("iss", "acme", "another")), ARGUMENTS, "third")
    store.forget(place("first"))
    store.open(place("third"), ARGUMENTS, "third")


def test_answers_are_remembered_up_to_so_many_bytes(seconds: Seconds) -> None:
    store = IdempotencyStore[str](seconds, of_tenant=Quota(10, 10))
    store.open(place("large"), ARGUMENTS, "first")
    store.ended(place("large"), None, "x" * 10, 10)
    assert refused(store, place("new")).failure is Failure.RATE_LIMITED
    assert store.open(place("large"), ARGUMENTS, "again").outcome == "x" * 10
    seconds.now += REMEMBERED_S
    store.open(place("new"), ARGUMENTS, "second")


def test_a_key_that_is_used_anew_after_its_time_ends_after_the_others(
    store: IdempotencyStore[str], seconds: Seconds
) -> None:
    filled(store, seconds)
    seconds.now += REMEMBERED_S - 30
    store.open(place("key 0"), ARGUMENTS, "anew")
    assert refused(store, place("new")).retry_after_ms == 10_000
    seconds.now += 10
    store.open(place("new"), ARGUMENTS, "new")
    assert store.open(place("key 0"), ARGUMENTS, "again").first == "anew"


async def test_a_call_under_way_is_neither_forgotten_nor_begun_anew_when_its_time_is_over(
    store: IdempotencyStore[str], seconds: Seconds
) -> None:
    filled(store, seconds)
    keyed = store.open(place("key 0"), ARGUMENTS, "again")
    keyed.begin(task := asyncio.create_task(hanging()))
    seconds.now += 2 * REMEMBERED_S
    assert store.open(place("key 0"), ARGUMENTS, "late") is keyed
    error = refused(store, place("new"))
    assert (error.failure, error.retry_after_ms) == (Failure.RATE_LIMITED, 1)
    assert store.open(place("key 0"), ARGUMENTS, "later") is keyed
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task
    assert store.open(place("key 0"), ARGUMENTS, "last").first == "last"


# --- full, and some calls may run twice -----------------------------------------------------------------


async def ended(store: IdempotencyStore[str], key: CallKey, answer: str = "ok") -> None:
    """Make a call that may run twice, and let it end."""

    async def sent() -> str:
        store.ended(key, None, answer, len(answer))
        return answer

    keyed = store.open(key, ARGUMENTS, "first", repeatable=True)
    keyed.begin(task := asyncio.create_task(sent()))
    await task


async def test_the_oldest_ended_key_of_a_call_that_may_run_twice_goes_first(
    store: IdempotencyStore[str],
) -> None:
    store.open(place("lasting"), ARGUMENTS, "lasting")
    for key in ("older", "newer"):
        await ended(store, place(key))
    store.open(place("new"), ARGUMENTS, "new")
    assert len(store) == 3
    assert store.open(place("lasting"), ARGUMENTS, "again").first == "lasting"
    assert store.open(place("newer"), ARGUMENTS, "again").outcome == "ok"
    assert store.open(place("older"), OTHER_ARGUMENTS, "again", repeatable=True).outcome is None


async def test_twenty_thousand_calls_that_may_run_twice_are_not_refused(seconds: Seconds) -> None:
    store = IdempotencyStore[str](seconds)
    store.open(place("lasting"), ARGUMENTS, "lasting")
    for number in range(20_000):
        await ended(store, place(str(number)), "x" * 20_000)
        seconds.now += 1 / PER_AGENT.rate
    assert store.open(place("lasting"), ARGUMENTS, "again").first == "lasting"
    assert store.open(place("19999"), ARGUMENTS, "again").outcome is not None


async def test_neither_a_running_call_nor_one_that_may_not_run_twice_goes(
    store: IdempotencyStore[str],
) -> None:
    tasks = [asyncio.create_task(hanging()) for _ in range(2)]
    for number, task in enumerate(tasks):
        store.open(place(str(number)), ARGUMENTS, str(number), repeatable=True).begin(task)
    store.open(place("lasting"), ARGUMENTS, "lasting")
    assert refused(store, place("new")).failure is Failure.RATE_LIMITED
    for number in range(10):
        await ended(store, place(f"repeatable {number}"))  # over the quota while it runs
        assert len(store) == 4
    for first in ("0", "1", "lasting"):
        assert store.open(place(first), ARGUMENTS, "again").first == first
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    store.open(place("new"), ARGUMENTS, "new")
    assert len(store) == 3


async def test_a_caller_that_uses_up_its_quota_takes_no_key_of_another(seconds: Seconds) -> None:
    store = IdempotencyStore[str](seconds, of_all=Quota(4, 1000), of_caller=Quota(2, 100))
    other = place("theirs", ("iss", "acme", "other"))
    await ended(store, other)
    for number in range(10):
        await ended(store, place(str(number)))
    assert len(store) == 3
    assert store.open(other, ARGUMENTS, "again").outcome == "ok"


KEY = Idempotency(("https://relay.example", "acme", "agent"), "ab" * 32, "cd" * 32, repeatable=False)

COMMAND = Command(
    NODE_ID,
    f"sysecho.{NODE_ID}.echo.invoke",
    {"message": "ping"},
    5000,
    "01HZX9K3M4P7Q8R9S0T1V2W3XA",
    idempotency=KEY,
)

REPEATABLE = COMMAND._replace(idempotency=replace(KEY, repeatable=True))

SECOND = COMMAND._replace(correlation_id="01HZX9K3M4P7Q8R9S0T1V2W3XB")


def keyed(router: LocalRouter, seconds: Seconds | None = None) -> KeyedCommands:
    monotonic = seconds or Seconds()
    return KeyedCommands(router, IdempotencyStore[str](monotonic), monotonic)


@pytest.mark.parametrize("failure", [Failure.NODE_OFFLINE, Failure.RATE_LIMITED])
async def test_what_was_never_sent_leaves_the_key_free(failure: Failure) -> None:
    router = ScriptedRouter(refusing(failure))
    commands = keyed(router)
    assert await failure_of(commands, COMMAND) is failure
    router.answer = lambda _: refusal("E_RATE_LIMITED")
    assert (await commands.run(SECOND))["ok"] is False
    router.answer = echoed
    assert await commands.run(SECOND) == echoed(COMMAND)


def refusal(code: str) -> dict[str, Any]:
    return {"ok": False, "error": {"code": code, "message": "m", "suggested_fix": "f"}}


async def failure_of(commands: KeyedCommands, command: Command) -> Failure:
    with pytest.raises(ToolError) as error:
        await commands.run(command)
    return error.value.failure


async def test_a_command_without_a_key_runs_each_time() -> None:
    router = ScriptedRouter()
    commands = keyed(router)
    for _ in range(2):
        assert await commands.run(COMMAND._replace(idempotency=None)) == echoed(COMMAND)
    assert len(router.commands) == 2


@pytest.mark.parametrize("answer", [echoed, lambda _: refusal("E_INTERNAL")])
async def test_a_repetition_gets_the_answer_of_the_first(answer: Any) -> None:
    router = ScriptedRouter(answer)
    commands = keyed(router)
    assert await commands.run(COMMAND) == await commands.run(SECOND) == answer(COMMAND)
    assert router.commands == [COMMAND]


async def test_a_repetition_joins_the_first_and_leaves_it_alone_when_cancelled_or_out_of_time() -> None:
    router = HeldRouter()
    commands = keyed(router)
    first, second, third = (asyncio.create_task(commands.run(each)) for each in (COMMAND, SECOND, SECOND))
    command, answer = await router.next()
    second.cancel()
    await asyncio.wait({second})
    assert await failure_of(commands, SECOND._replace(deadline_ms=1)) is Failure.DEADLINE_EXCEEDED
    answer.set_result(echoed(command))
    assert await first == await third == await commands.run(SECOND) == echoed(COMMAND)
    assert router.waiting.empty()


async def test_the_first_when_cancelled_is_cancelled_at_the_node_and_its_outcome_is_unknown() -> None:
    router = HeldRouter()
    commands = keyed(router)
    first = asyncio.create_task(commands.run(COMMAND))
    _, answer = await router.next()
    second = asyncio.create_task(commands.run(SECOND))
    await asyncio.sleep(0)
    first.cancel()
    await until(answer.cancelled)
    with pytest.raises(ToolError) as joined:
        await second
    assert (joined.value.failure, joined.value.detail) == (Failure.DEADLINE_EXCEEDED, OUTCOME_UNKNOWN)
    assert await failure_of(commands, SECOND) is Failure.DEADLINE_EXCEEDED


@pytest.mark.parametrize("answer", [refusing(Failure.DEADLINE_EXCEEDED), answering("E_DEADLINE_EXCEEDED")])
async def test_what_may_have_run_is_sent_again_only_if_the_tool_is_idempotent(answer: Any) -> None:
    router = ScriptedRouter(answer)
    commands = keyed(router)
    with suppress(ToolError):
        await commands.run(COMMAND)
    router.answer = echoed
    assert await failure_of(commands, SECOND) is Failure.DEADLINE_EXCEEDED
    assert len(router.commands) == 1
    assert await commands.run(REPEATABLE) == echoed(COMMAND)


async def test_of_a_node_that_another_relay_held_a_new_key_may_be_an_old_one() -> None:
    router, seconds = ScriptedRouter(), Seconds()
    commands = keyed(router, seconds)
    commands.moved(NODE_ID)
    assert await failure_of(commands, COMMAND) is Failure.DEADLINE_EXCEEDED
    assert router.commands == []
    # Without a key, and for what may run twice, it makes no difference.
    assert await commands.run(COMMAND._replace(idempotency=None)) == echoed(COMMAND)
    assert await commands.run(REPEATABLE) == echoed(COMMAND)
    seconds.now += REMEMBERED_S
    other = COMMAND._replace(idempotency=replace(KEY, key="ef" * 32))
    assert await commands.run(other) == echoed(COMMAND)


async def test_what_was_called_before_the_node_moved_here_again_is_known() -> None:
    router = ScriptedRouter()
    commands = keyed(router)
    await commands.run(COMMAND)
    commands.moved(NODE_ID)
    assert await commands.run(SECOND) == echoed(COMMAND)
    assert len(router.commands) == 1


async def test_while_it_is_not_known_who_had_the_node_before_a_new_key_may_be_an_old_one() -> None:
    router = ScriptedRouter()
    commands = keyed(router)
    commands.history_unknown(NODE_ID, True)  # noqa: FBT003 - as presence calls it
    assert await failure_of(commands, COMMAND) is Failure.DEADLINE_EXCEEDED
    assert router.commands == []
    commands.history_unknown(NODE_ID, False)  # noqa: FBT003
    assert await commands.run(SECOND) == echoed(SECOND)
