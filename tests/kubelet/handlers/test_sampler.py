import asyncio
from collections.abc import Sequence

import pytest

from kubelet.handlers.readings import CpuTimes
from kubelet.handlers.sampler import (
    FIRST_INTERVAL_S,
    INTERVAL_S,
    LONGEST_INTERVAL_S,
    CpuMeter,
    CpuSampler,
    CpuUsage,
    usage_between,
)
from tests.fakes.seconds import Seconds

BOUND_S = 10


class Pauses:
    """Stands for ``asyncio.sleep``: every pause lasts until the test ends it."""

    def __init__(self) -> None:
        self._begun: asyncio.Queue[tuple[float, asyncio.Event]] = asyncio.Queue()

    async def sleep(self, seconds: float) -> None:
        end = asyncio.Event()
        await self._begun.put((seconds, end))
        await end.wait()

    async def next(self) -> tuple[float, asyncio.Event]:
        return await asyncio.wait_for(self._begun.get(), BOUND_S)


class Counters:
    """CPU counters that step through what they are given; an exception in it is raised."""

    def __init__(self, *steps: Sequence[CpuTimes] | OSError) -> None:
        self._steps = iter(steps)

    def __call__(self) -> Sequence[CpuTimes]:
        step = next(self._steps)
        if isinstance(step, OSError):
            raise step
        return step


def test_usage_is_work_by_total_over_all_cpus_and_for_each() -> None:
    before = [CpuTimes(10, 100), CpuTimes(20, 100)]
    after = [CpuTimes(11, 104), CpuTimes(23, 104)]
    assert usage_between(before, after) == CpuUsage(50.0, (25.0, 75.0))


def test_percentages_have_two_decimals() -> None:
    assert usage_between([CpuTimes(0, 0)], [CpuTimes(1, 3)]) == CpuUsage(33.33, (33.33,))


def test_counters_that_run_backwards_stay_within_bounds() -> None:
    before = [CpuTimes(10, 100), CpuTimes(10, 100), CpuTimes(10, 100)]
    after = [CpuTimes(9, 101), CpuTimes(12, 101), CpuTimes(11, 99)]
    assert usage_between(before, after) == CpuUsage(100.0, (0.0, 100.0, 0.0))


def test_a_cpu_whose_counters_stand_still_is_idle() -> None:
    before = [CpuTimes(10, 100), CpuTimes(10, 100)]
    after = [CpuTimes(10, 100), CpuTimes(11, 102)]
    assert usage_between(before, after) == CpuUsage(50.0, (0.0, 50.0))


@pytest.mark.parametrize(
    ("before", "after"),
    [
        pytest.param([], [], id="no CPU"),
        pytest.param([], [CpuTimes(5, 10)], id="no reading before"),
        pytest.param([CpuTimes(0, 0)], [CpuTimes(1, 2), CpuTimes(1, 2)], id="a CPU came"),
        pytest.param([CpuTimes(5, 10)], [CpuTimes(5, 10)], id="no time has passed"),
        pytest.param([CpuTimes(5, 10)], [CpuTimes(1, 2)], id="counters began anew"),
    ],
)
def test_readings_that_make_no_interval_give_no_usage(before: list[CpuTimes], after: list[CpuTimes]) -> None:
    assert usage_between(before, after) is None


async def test_the_first_interval_is_short_and_the_others_are_not() -> None:
    pauses = Pauses()
    counters = Counters([CpuTimes(0, 0)], [CpuTimes(1, 4)], [CpuTimes(4, 8)])
    sampler = CpuSampler(counters, sleep=pauses.sleep)
    task = asyncio.create_task(sampler.run())

    seconds, end = await pauses.next()
    assert (seconds, sampler.latest, sampler.first.is_set()) == (FIRST_INTERVAL_S, None, False)
    end.set()
    seconds, end = await pauses.next()
    assert (seconds, sampler.first.is_set()) == (INTERVAL_S, True)
    assert sampler.latest == CpuUsage(25.0, (25.0,))
    end.set()
    await pauses.next()
    assert sampler.latest == CpuUsage(75.0, (75.0,))
    task.cancel()


async def test_counters_that_cannot_be_read_leave_the_last_usage_standing() -> None:
    pauses = Pauses()
    counters = Counters([CpuTimes(0, 0)], [CpuTimes(1, 4)], OSError(), [CpuTimes(7, 12)])
    sampler = CpuSampler(counters, sleep=pauses.sleep)
    task = asyncio.create_task(sampler.run())

    for _ in range(2):
        (await pauses.next())[1].set()
    _, end = await pauses.next()
    assert sampler.latest == CpuUsage(25.0, (25.0,))
    end.set()
    await pauses.next()
    assert sampler.latest == CpuUsage(75.0, (75.0,))
    task.cancel()


def metered(*steps: Sequence[CpuTimes] | OSError) -> tuple[CpuMeter, Seconds]:
    clock = Seconds()
    return CpuMeter(Counters(*steps), clock), clock


def test_a_meter_has_the_usage_since_it_was_last_read() -> None:
    meter, clock = metered([CpuTimes(0, 0)], [CpuTimes(1, 2)], [CpuTimes(4, 6)])
    assert meter.usage() is None
    clock.now += 1
    assert meter.usage() == CpuUsage(50.0, (50.0,))
    clock.now += 60
    assert meter.usage() == CpuUsage(75.0, (75.0,))


def test_a_meter_that_is_read_twice_at_once_repeats_itself() -> None:
    meter, clock = metered([CpuTimes(0, 0)], [CpuTimes(1, 2)])
    meter.usage()
    clock.now += 1
    assert meter.usage() == meter.usage()


def test_a_meter_that_was_not_read_for_long_begins_anew() -> None:
    meter, clock = metered([CpuTimes(0, 0)], [CpuTimes(1, 2)], [CpuTimes(2, 3)])
    meter.usage()
    clock.now += LONGEST_INTERVAL_S + 1
    assert meter.usage() is None
    clock.now += 1
    assert meter.usage() == CpuUsage(100.0, (100.0,))


def test_counters_that_a_meter_cannot_read_leave_the_last_usage() -> None:
    meter, clock = metered([CpuTimes(0, 0)], [CpuTimes(1, 2)], OSError())
    meter.usage()
    clock.now += 1
    usage = meter.usage()
    clock.now += 1
    assert meter.usage() == usage
