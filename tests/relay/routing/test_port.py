import asyncio
from typing import Any

import pytest

from relay.routing.port import CommandAnswer, answer_of
from schemas.errors import Failure, ToolError
from schemas.payloads import CmdAck

DONE: CmdAck = {"ok": True, "result": {}}
REVOKED = ToolError(Failure.ATTESTATION_FAILED)


def answer() -> CommandAnswer:
    return CommandAnswer(asyncio.get_running_loop())


def followed(by: CommandAnswer) -> list[CommandAnswer]:
    seen: list[CommandAnswer] = []
    by.at_end(seen.append)
    return seen


async def test_what_follows_is_called_before_the_caller_goes_on() -> None:
    waited, order = answer(), list[str]()
    waited.at_end(lambda _: order.append("follower"))

    async def caller() -> None:
        await waited
        order.append("caller")

    calling = asyncio.create_task(caller())
    await asyncio.sleep(0)
    waited.set_result(DONE)
    assert order == ["follower"]
    await calling
    assert order == ["follower", "caller"]


async def test_each_end_is_followed_once() -> None:
    ended, failed, expired, cancelled = (answer() for _ in range(4))
    follows = [followed(each) for each in (ended, failed, expired, cancelled)]
    ended.set_result(DONE)
    failed.set_exception(REVOKED)
    expired.expire()
    for each in (cancelled, ended):
        each.cancel()
    cancelled.cancel()
    expired.expire()
    assert [each.cancelled() for each in (ended, failed, expired, cancelled)] == [False, False, False, True]
    assert ended.result() == DONE
    assert follows == [[ended], [failed], [expired], [cancelled]]
    assert failed.exception() is REVOKED
    error = expired.exception()
    assert isinstance(error, ToolError)
    assert error.failure is Failure.DEADLINE_EXCEEDED


async def test_what_has_ended_is_followed_at_once() -> None:
    ended = answer()
    ended.set_result(DONE)
    assert followed(ended) == [ended]


async def test_cancelling_what_awaits_it_cancels_it() -> None:
    waited = answer()
    seen = followed(waited)
    calling = asyncio.ensure_future(awaited(waited))
    await asyncio.sleep(0)
    calling.cancel()
    with pytest.raises(asyncio.CancelledError):
        await calling
    assert seen == [waited]
    assert waited.cancelled()


async def awaited(waited: CommandAnswer) -> object:
    return await waited


async def test_a_bug_of_one_follower_is_reported_and_the_next_is_called() -> None:
    reported: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context))
    waited, bug = answer(), ValueError("a bug")

    def breaks(_: CommandAnswer) -> None:
        raise bug

    waited.at_end(breaks)
    seen = followed(waited)
    waited.set_result(DONE)
    assert seen == [waited]
    assert [context["exception"] for context in reported] == [bug]


async def test_the_answer_of_a_coroutine_is_what_it_returns_or_raises() -> None:
    async def works() -> CmdAck:
        return DONE

    async def fails() -> CmdAck:
        raise REVOKED

    async def gives_up() -> CmdAck:
        raise asyncio.CancelledError

    assert await answer_of(works()) == DONE
    with pytest.raises(ToolError):
        await answer_of(fails())
    with pytest.raises(asyncio.CancelledError):
        await answer_of(gives_up())


async def test_cancelling_the_answer_of_a_coroutine_cancels_it() -> None:
    began, ended = asyncio.Event(), asyncio.Event()

    async def waits() -> CmdAck:
        began.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()
        return DONE

    waited = answer_of(waits())
    await began.wait()
    waited.cancel()
    await asyncio.wait_for(ended.wait(), 30)
