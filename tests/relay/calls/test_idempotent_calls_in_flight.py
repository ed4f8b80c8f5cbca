"""Calls with an idempotency key in flight: who joins them, disconnects, or has its token revoked."""

import asyncio
from typing import Any

from schemas.errors import Failure, ToolError
from tests.fakes.hub import Hub
from tests.fakes.keyed_calls import (
    BOUND_S,
    CONSTRAINTS,
    MAY_HAVE_RUN,
    PONG,
    Stage,
    code,
    error_of,
    hung_up,
    until_joined,
)
from tests.fakes.routers import HeldRouter, echoed
from tests.fakes.seconds import Seconds
from tests.fakes.signer import ECHO

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


async def test_who_joined_gets_the_error_of_the_call_under_its_own_id(
    waiting: Stage, held: HeldRouter
) -> None:
    tasks = [waiting.begin() for _ in range(2)]
    _, answer = await held.next()
    await until_joined(waiting, 2)
    answer.set_exception(ToolError(Failure.NODE_OFFLINE))
    first, second = await asyncio.gather(*tasks)
    assert error_of(first) == error_of(second)
    assert error_of(first)["code"] == "E_NODE_OFFLINE"
    assert first.error != second.error


async def test_other_arguments_are_refused_while_the_call_is_under_way(
    waiting: Stage, held: HeldRouter
) -> None:
    first = waiting.begin()
    command, answer = await held.next()
    assert code(await waiting.call(arguments=PONG)) == "E_MANIFEST_INVALID"
    answer.set_result(echoed(command))
    assert code(await first) == "ok"


async def test_a_bug_in_the_call_is_told_to_all_who_wait_for_it(waiting: Stage, held: HeldRouter) -> None:
    tasks = [waiting.begin() for _ in range(2)]
    _, answer = await held.next()
    await until_joined(waiting, 2)
    answer.set_exception(ZeroDivisionError())
    assert [code(each) for each in await asyncio.gather(*tasks)] == ["E_INTERNAL"] * 2


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


async def test_a_caller_that_joined_and_disconnects_does_not_affect_the_others(
    waiting: Stage, held: HeldRouter
) -> None:
    first, second = [waiting.begin() for _ in range(2)]
    command, answer = await held.next()
    await until_joined(waiting, 2)
    await hung_up(second)
    answer.set_result(echoed(command))
    assert code(await first) == "ok"


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


async def test_a_token_that_both_have_is_revoked_for_both(waiting: Stage, held: HeldRouter) -> None:
    tasks = [waiting.begin() for _ in range(2)]
    await held.next()
    await until_joined(waiting, 2)
    waiting.gateway.revoke({waiting.jti(waiting.token)})
    async with asyncio.timeout(BOUND_S):
        assert [code(await task) for task in tasks] == ["E_SAFETY_DENIED"] * 2


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
