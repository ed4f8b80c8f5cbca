import asyncio
import gc
from collections.abc import Awaitable, Callable

import pytest

from relay.calls.executor import InFlight
from schemas.errors import Failure, ToolError

BOUND_S = 10


class Calls:
    """Calls that wait until they are answered, and what they left behind."""

    def __init__(self) -> None:
        self.inflight = InFlight()
        self.answers: dict[str, asyncio.Future[str]] = {}
        self._entered: asyncio.Queue[str] = asyncio.Queue()

    async def _call(self, jti: str, name: str) -> str:
        self.answers[name] = asyncio.get_running_loop().create_future()
        async with self.inflight.under(jti):
            self._entered.put_nowait(name)
            return await self.answers[name]

    async def begin(self, jti: str, name: str = "call") -> asyncio.Task[str]:
        """Return the task of a call that waits for its answer."""
        task = asyncio.create_task(self._call(jti, name))
        assert await asyncio.wait_for(self._entered.get(), BOUND_S) == name
        return task

    @property
    def held(self) -> int:
        """How many objects of calls are still remembered."""
        return len(self.inflight._calls)  # noqa: SLF001 - a leak shows nowhere else


@pytest.fixture
def calls() -> Calls:
    return Calls()


async def denied(task: asyncio.Task[str]) -> ToolError:
    with pytest.raises(ToolError) as caught:
        await asyncio.wait_for(task, BOUND_S)
    assert caught.value.failure is Failure.TOKEN_REFUSED
    assert not task.cancelled()
    return caught.value


async def test_a_call_that_is_not_revoked_is_answered(calls: Calls) -> None:
    task = await calls.begin("jti-1")
    calls.answers["call"].set_result("done")
    assert await task == "done"
    assert calls.held == 0


async def test_a_call_whose_token_is_revoked_ends_at_once_and_the_others_go_on(calls: Calls) -> None:
    first = await calls.begin("jti-1", "first")
    second = await calls.begin("jti-1", "second")
    other = await calls.begin("jti-2", "other")
    calls.inflight.revoke(frozenset({"jti-1", "never seen"}))
    for task in (first, second):
        assert "revoked during the call" in str(await denied(task))
    assert not other.done()
    calls.answers["other"].set_result("done")
    assert await other == "done"
    assert calls.held == 0


async def test_after_the_call_the_task_is_as_if_nothing_had_happened(calls: Calls) -> None:
    task = await calls.begin("jti-1")
    calls.inflight.revoke({"jti-1"})
    await denied(task)

    async def revoked() -> None:
        inflight = InFlight()
        async with inflight.under("jti"):
            inflight.revoke({"jti"})
            await asyncio.Event().wait()

    async def goes_on() -> str:
        inner = asyncio.current_task()
        assert inner is not None
        with pytest.raises(ToolError):
            await revoked()
        assert inner.cancelling() == 0
        await asyncio.sleep(0)  # no cancellation is left that would hit this
        return "went on"

    assert await asyncio.wait_for(asyncio.create_task(goes_on()), BOUND_S) == "went on"


async def test_revoking_twice_is_as_good_as_once(calls: Calls) -> None:
    task = await calls.begin("jti-1")
    calls.inflight.revoke({"jti-1"})
    calls.inflight.revoke({"jti-1"})
    await denied(task)
    calls.inflight.revoke({"jti-1"})
    assert calls.held == 0


async def test_a_token_that_is_void_begins_nothing_more(calls: Calls) -> None:
    await denied_at_once(calls)
    with pytest.raises(ToolError) as caught:
        async with calls.inflight.under("jti-1"):
            raise AssertionError
    assert caught.value.failure is Failure.TOKEN_REFUSED
    assert calls.held == 0


async def denied_at_once(calls: Calls) -> None:
    task = await calls.begin("jti-1")
    calls.inflight.revoke({"jti-1"})
    await denied(task)


# --- in the very moment -------------------------------------------------------------------------------


async def test_an_answer_that_comes_first_in_the_same_moment_is_not_given_out(calls: Calls) -> None:
    task = await calls.begin("jti-1")
    calls.answers["call"].set_result("done")
    calls.inflight.revoke({"jti-1"})
    await denied(task)
    assert calls.held == 0


async def test_an_answer_that_comes_after_the_revocation_is_not_given_out(calls: Calls) -> None:
    task = await calls.begin("jti-1")
    calls.inflight.revoke({"jti-1"})
    assert calls.answers["call"].cancelled()
    await denied(task)


async def test_an_error_of_the_same_moment_is_not_told_either(calls: Calls) -> None:
    task = await calls.begin("jti-1")
    calls.answers["call"].set_exception(ToolError(Failure.NODE_OFFLINE))
    calls.inflight.revoke({"jti-1"})
    await denied(task)


async def run(body: Callable[[InFlight], Awaitable[str]]) -> str:
    """Run a call that revokes itself, in a task of its own, and check that the task is sound afterwards."""

    async def work() -> str:
        inflight, task = InFlight(), asyncio.current_task()
        assert task is not None
        try:
            async with inflight.under("jti"):
                return await body(inflight)
        finally:
            assert task.cancelling() == 0
            await asyncio.sleep(0)  # nothing is left that would hit this

    return await asyncio.wait_for(asyncio.create_task(work()), BOUND_S)


async def test_a_call_that_is_revoked_in_its_last_step_gives_nothing_out() -> None:
    async def last_step(inflight: InFlight) -> str:
        inflight.revoke({"jti"})
        return "done"

    with pytest.raises(ToolError) as caught:
        await run(last_step)
    assert caught.value.failure is Failure.TOKEN_REFUSED


async def test_a_call_that_fails_in_its_last_step_tells_only_that_the_token_is_revoked() -> None:
    async def last_step(inflight: InFlight) -> str:
        inflight.revoke({"jti"})
        raise ToolError(Failure.NODE_OFFLINE)

    with pytest.raises(ToolError) as caught:
        await run(last_step)
    assert caught.value.failure is Failure.TOKEN_REFUSED


async def test_a_call_that_outlives_its_cancellation_gives_nothing_out() -> None:
    async def stubborn(inflight: InFlight) -> str:
        inflight.revoke({"jti"})
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            return "done all the same"
        raise AssertionError

    with pytest.raises(ToolError) as caught:
        await run(stubborn)
    assert caught.value.failure is Failure.TOKEN_REFUSED


async def test_a_deadline_of_the_same_moment_does_not_hide_the_revocation() -> None:
    async def late(inflight: InFlight) -> str:
        async with asyncio.timeout(0):
            inflight.revoke({"jti"})
            await asyncio.Event().wait()
        raise AssertionError

    with pytest.raises(ToolError) as caught:
        await run(late)
    assert caught.value.failure is Failure.TOKEN_REFUSED


# --- whose caller has gone too ------------------------------------------------------------------------


@pytest.mark.parametrize("first", ["caller", "operator"])
async def test_a_call_that_its_caller_ends_in_the_same_moment_stays_ended(calls: Calls, first: str) -> None:
    task = await calls.begin("jti-1")
    acts: list[Callable[[], object]] = [task.cancel, lambda: calls.inflight.revoke({"jti-1"})]
    for act in acts if first == "caller" else reversed(acts):
        act()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(task, BOUND_S)
    assert task.cancelled()
    assert calls.held == 0


@pytest.mark.parametrize("answered", [True, False], ids=["answered", "failed"])
async def test_a_call_that_ended_stays_ended_if_its_caller_ends_it_as_it_is_revoked(
    *, answered: bool
) -> None:
    inflight = InFlight()

    async def work() -> str:
        task = asyncio.current_task()
        assert task is not None
        async with inflight.under("jti"):
            inflight.revoke({"jti"})
            task.cancel()
            if not answered:
                raise ToolError(Failure.NODE_OFFLINE)
        return "went on as if it had not been ended"

    task = asyncio.create_task(work())
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(task, BOUND_S)
    assert task.cancelled()


async def test_a_caller_who_has_gone_before_the_call_began_is_no_reason_to_keep_the_call() -> None:
    # Clean-up after a cancellation may make a call: the task's count is not zero then.
    inflight = InFlight()
    codes: list[Failure] = []

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            try:
                async with inflight.under("jti"):
                    inflight.revoke({"jti"})
                    await asyncio.Event().wait()
            except ToolError as error:
                codes.append(error.failure)

    task = asyncio.create_task(work())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(task, BOUND_S)
    assert codes == [Failure.TOKEN_REFUSED]


async def test_a_cancelled_call_that_is_not_revoked_is_cancelled(calls: Calls) -> None:
    task = await calls.begin("jti-1")
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert calls.held == 0


# --- nothing leaks ------------------------------------------------------------------------------------


async def end_somehow(calls: Calls, number: int) -> None:
    task = await calls.begin(f"jti-{number}")
    if number % 3:
        calls.inflight.revoke({f"jti-{number}"})
        await denied(task)
    else:
        calls.answers["call"].set_exception(RuntimeError)
        with pytest.raises(RuntimeError):
            await task


async def test_what_is_over_is_forgotten(calls: Calls) -> None:
    for number in range(50):
        # In a task of its own: a frame that goes on may keep the exceptions that passed it.
        await asyncio.create_task(end_somehow(calls, number))
    assert calls.held == 0
    calls.answers.clear()
    gc.collect()
    assert not [each for each in gc.get_objects() if type(each).__name__ == "RevocableCall"]


async def test_to_look_for_a_token_that_calls_nothing_leaves_nothing(calls: Calls) -> None:
    calls.inflight.revoke({"a", "b"})
    assert calls.held == 0


async def test_a_call_that_was_allowed_and_has_not_begun_is_not_made() -> None:
    inflight = InFlight()
    call = inflight.under("jti")
    call.end((Failure.TOKEN_REFUSED, "The token was revoked during the call."))
    inflight.revoke({"jti"})
    with pytest.raises(ToolError):
        async with call:
            raise AssertionError


# --- at the end of the relay --------------------------------------------------------------------------


async def test_draining_waits_for_the_calls_in_flight(calls: Calls) -> None:
    task = await calls.begin("jti-1")
    draining = asyncio.create_task(calls.inflight.drain(BOUND_S))
    await asyncio.sleep(0)
    assert not draining.done()
    calls.answers["call"].set_result("done")
    assert await task == "done"
    await asyncio.wait_for(draining, BOUND_S)


async def test_draining_ends_the_calls_that_last_too_long_with_an_honest_error(calls: Calls) -> None:
    task = await calls.begin("jti-1")
    await asyncio.wait_for(calls.inflight.drain(0.01), BOUND_S)
    with pytest.raises(ToolError) as caught:
        await asyncio.wait_for(task, BOUND_S)
    assert caught.value.failure is Failure.DEADLINE_EXCEEDED
    assert "stopped during the call" in str(caught.value)


async def test_draining_returns_at_once_when_no_call_is_in_flight(calls: Calls) -> None:
    await asyncio.wait_for(calls.inflight.drain(BOUND_S), 1)
