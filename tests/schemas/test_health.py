import asyncio

import pytest

from schemas.health import Health, Loop, endless, stalled
from tests.fakes.seconds import Seconds


@pytest.fixture
def seconds() -> Seconds:
    return Seconds()


@pytest.fixture
def loop(seconds: Seconds) -> Loop:
    return Loop(seconds)


def test_a_loop_is_live_before_its_first_round_but_not_started(loop: Loop, seconds: Seconds) -> None:
    seconds.now += 1e6
    assert (loop.started, loop.is_live) == (False, True)


def test_a_loop_is_live_for_as_long_as_it_said_and_no_longer(loop: Loop, seconds: Seconds) -> None:
    loop.busy(10)
    seconds.now += 10
    assert (loop.started, loop.is_live) == (True, True)
    seconds.now += 0.1
    assert not loop.is_live
    loop.busy(10)
    assert loop.is_live


def test_a_loop_may_wait_for_what_comes_from_outside_for_any_time(loop: Loop, seconds: Seconds) -> None:
    loop.busy(10)
    loop.waits()
    seconds.now += 1e6
    assert (loop.started, loop.is_live) == (True, True)


def test_the_loops_that_have_stalled_are_named(seconds: Seconds) -> None:
    slow, quick, waiting = Loop(seconds), Loop(seconds), Loop(seconds)
    slow.busy(100)
    quick.busy(1)
    waiting.waits()
    loops = {"slow": slow, "quick": quick, "waiting": waiting}
    assert stalled(loops) == []
    seconds.now += 2
    assert stalled(loops) == ["quick"]


def test_the_health_of_a_subsystem_is_that_of_its_loop(loop: Loop, seconds: Seconds) -> None:
    assert Health.of(loop, ready=False) == Health(started=False, live=True, ready=False)
    loop.busy(1)
    seconds.now += 2
    health = Health.of(loop, ready=True, state="connected")
    assert health.to_json() == {"started": True, "live": False, "ready": True, "state": "connected"}


def test_calls_flow_without_what_is_not_essential_but_not_without_its_progress(
    loop: Loop, seconds: Seconds
) -> None:
    assert not Health.of(loop, ready=False).lets_calls_flow
    assert Health.of(loop, ready=True).lets_calls_flow
    assert Health.of(loop, ready=False, essential=False).lets_calls_flow
    loop.busy(1)
    seconds.now += 2
    assert not Health.of(loop, ready=True, essential=False).lets_calls_flow


def test_what_works_when_it_is_called_has_no_progress_to_show() -> None:
    assert Health.passive(ready=False).to_json() == {"started": True, "live": True, "ready": False}


async def test_a_service_loop_that_ends_is_an_error_that_names_it() -> None:
    with pytest.raises(RuntimeError, match="'broker' has ended"):
        await endless("broker", asyncio.sleep(0))


async def test_a_service_loop_that_fails_fails_with_its_own_error() -> None:
    async def broken() -> None:
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        await endless("broker", broken())
