"""A command under an idempotency key runs once at the relay that holds its node, whichever relay sent it."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from relay.calls.idempotency import (
    OUTCOME_UNKNOWN,
    QUOTA_OF_CALLER,
    REMEMBERED_S,
    IdempotencyStore,
    KeyedCommands,
)
from relay.routing.port import Command, Idempotency, LocalRouter
from schemas.errors import Failure, ToolError
from tests.fakes.polling import until
from tests.fakes.routers import HeldRouter, ScriptedRouter, echoed
from tests.fakes.seconds import Seconds
from tests.fakes.signer import NODE_ID

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


def failing(failure: Failure) -> Any:
    def answer(_command: Command) -> dict[str, Any]:
        raise ToolError(failure)

    return answer


def refused(code: str) -> dict[str, Any]:
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


async def test_a_repetition_gets_the_answer_of_the_first() -> None:
    router = ScriptedRouter()
    commands = keyed(router)
    assert await commands.run(COMMAND) == await commands.run(SECOND) == echoed(COMMAND)
    assert router.commands == [COMMAND]


async def test_a_repetition_joins_the_first_while_it_runs() -> None:
    router = HeldRouter()
    commands = keyed(router)
    first, second = (asyncio.create_task(commands.run(each)) for each in (COMMAND, SECOND))
    command, answer = await router.next()
    answer.set_result(echoed(command))
    assert await first == await second
    assert router.waiting.empty()


async def test_a_repetition_that_is_cancelled_leaves_the_first_alone() -> None:
    router = HeldRouter()
    commands = keyed(router)
    first = asyncio.create_task(commands.run(COMMAND))
    command, answer = await router.next()
    second = asyncio.create_task(commands.run(SECOND))
    await asyncio.sleep(0)
    second.cancel()
    await asyncio.wait({second})
    answer.set_result(echoed(command))
    assert await first == echoed(COMMAND)


async def test_a_repetition_waits_no_longer_than_its_own_budget_and_leaves_the_first_alone() -> None:
    router = HeldRouter()
    commands = keyed(router)
    first = asyncio.create_task(commands.run(COMMAND))
    command, answer = await router.next()
    assert await failure_of(commands, SECOND._replace(deadline_ms=1)) is Failure.DEADLINE_EXCEEDED
    answer.set_result(echoed(command))
    assert await first == await commands.run(SECOND) == echoed(COMMAND)


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


async def test_the_key_with_other_arguments_is_refused() -> None:
    commands = keyed(ScriptedRouter())
    await commands.run(COMMAND)
    other = COMMAND._replace(idempotency=replace(KEY, arguments="ef" * 32))
    assert await failure_of(commands, other) is Failure.ENVELOPE_INVALID


@pytest.mark.parametrize("failure", [Failure.NODE_OFFLINE, Failure.RATE_LIMITED])
async def test_what_was_never_sent_leaves_the_key_free(failure: Failure) -> None:
    router = ScriptedRouter(failing(failure))
    commands = keyed(router)
    assert await failure_of(commands, COMMAND) is failure
    router.answer = echoed
    assert await commands.run(SECOND) == echoed(COMMAND)


async def test_what_the_node_refused_for_its_limit_leaves_the_key_free() -> None:
    router = ScriptedRouter(lambda _: refused("E_RATE_LIMITED"))
    commands = keyed(router)
    assert (await commands.run(COMMAND))["ok"] is False
    router.answer = echoed
    assert await commands.run(SECOND) == echoed(COMMAND)


async def test_an_error_of_the_node_is_an_outcome() -> None:
    router = ScriptedRouter(lambda _: refused("E_INTERNAL"))
    commands = keyed(router)
    assert await commands.run(COMMAND) == await commands.run(SECOND)
    assert len(router.commands) == 1


async def test_what_may_have_run_is_sent_again_only_if_the_tool_is_idempotent() -> None:
    router = ScriptedRouter(failing(Failure.DEADLINE_EXCEEDED))
    commands = keyed(router)
    assert await failure_of(commands, COMMAND) is Failure.DEADLINE_EXCEEDED
    router.answer = echoed
    assert await failure_of(commands, SECOND) is Failure.DEADLINE_EXCEEDED
    assert len(router.commands) == 1
    assert await commands.run(REPEATABLE) == echoed(COMMAND)


async def test_what_the_node_gave_up_at_its_deadline_may_have_run() -> None:
    router = ScriptedRouter(lambda _: refused("E_DEADLINE_EXCEEDED"))
    commands = keyed(router)
    assert (await commands.run(COMMAND))["ok"] is False
    assert await failure_of(commands, SECOND) is Failure.DEADLINE_EXCEEDED
    assert len(router.commands) == 1


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


async def test_commands_that_may_run_twice_are_not_refused_for_their_keys() -> None:
    router, seconds = ScriptedRouter(), Seconds()
    store = IdempotencyStore[str](seconds)
    commands = KeyedCommands(router, store, seconds)
    for number in range(QUOTA_OF_CALLER.keys + 10):
        key = replace(KEY, key=f"{number:064x}", repeatable=True)
        await commands.run(COMMAND._replace(idempotency=key))
    assert len(store) == QUOTA_OF_CALLER.keys
    for number in range(QUOTA_OF_CALLER.keys):
        await commands.run(COMMAND._replace(idempotency=replace(KEY, key=f"a{number:063x}")))
    last = COMMAND._replace(idempotency=replace(KEY, key="b" * 64))
    assert await failure_of(commands, last) is Failure.RATE_LIMITED
