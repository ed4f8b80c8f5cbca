import asyncio
import io
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from itertools import count
from typing import Any

import pytest

from kubelet.handlers.disks import Mount, Space
from kubelet.handlers.system_metrics import (
    FIRST_INTERVAL_S,
    INTERVAL_S,
    LONGEST_INTERVAL_S,
    CpuMeter,
    CpuSampler,
    CpuTimes,
    CpuUsage,
    LinuxReadings,
    MemoryReading,
    MetricsHandler,
    usage_between,
)
from schemas.canonical import jcs
from schemas.process.logs import make_logger
from schemas.registry import SchemaRegistry
from tests.fakes.pauses import Pauses
from tests.fakes.seconds import Seconds
from tests.fakes.shipped_kinds import METRICS, SYSTEM_METRICS

BOUND_S = 10
NODE_ID = "01hzx9k3m4p7q8r9s0t1v2w3xy"
NOW_MS = 1_760_000_000_000
ALL = {"cpu", "mem", "load", "disk"}
LOG = make_logger("kubelet", io.StringIO())
REQUIRED = {"ts_ms", "node_id", "uptime_s"}


class Machine(LinuxReadings):
    """Readings of a machine with two CPUs, of which the second is always busy."""

    def __init__(self) -> None:
        super().__init__()
        self._seconds = count()
        self.cores = 2
        self.memory_now = MemoryReading(total=8000, available=6000, swap_total=2000, swap_free=500)
        self.mounted = [Mount("/dev/sda1", "/", "ext4")]

    def cpu_times(self) -> Sequence[CpuTimes]:
        second = float(next(self._seconds))
        return [CpuTimes(0.0, second), *[CpuTimes(second, second)] * (self.cores - 1)]

    def memory(self) -> MemoryReading:
        return self.memory_now

    def load(self) -> tuple[float, float, float]:
        return (0.09033203125, 1.5, 2.0)

    def uptime_s(self) -> int:
        return 936

    def mounts(self) -> Sequence[Mount]:
        return self.mounted

    def space(self, path: str) -> Space:
        return Space(1000, 400) if path == "/" else Space(2**64, 2**64)


async def only_the_first(seconds: float) -> None:
    """Stand for ``asyncio.sleep``: the first interval is over at once, and no other ever is."""
    if seconds == FIRST_INTERVAL_S:
        await asyncio.sleep(0)
    else:
        await asyncio.Event().wait()


@asynccontextmanager
async def running(handler: MetricsHandler) -> AsyncIterator[None]:
    task = asyncio.create_task(handler.run())
    yield
    assert not task.done()
    task.cancel()
    await asyncio.wait([task])


def handler_of(machine: Machine, timeout_s: float = BOUND_S) -> MetricsHandler:
    return MetricsHandler(
        METRICS, NODE_ID, lambda: NOW_MS, LOG, readings=machine, sleep=only_the_first, timeout_s=timeout_s
    )


async def snapshot(machine: Machine, arguments: dict[str, Any]) -> dict[str, Any]:
    handler = handler_of(machine)
    async with running(handler):
        sample = await handler.invoke("snapshot", arguments)
    SchemaRegistry().load("system.metrics.sample@1.0.0").check(sample)
    jcs(sample)
    return sample


def test_the_capability_fits_the_manifest_and_the_kind() -> None:
    handler = handler_of(Machine())
    assert handler.capability is METRICS
    assert METRICS["cap_id"] == "sysmetrics"
    assert METRICS["constraints"] == {
        "rate_limit_rps": 5,
        "max_concurrency": 4,
        "deadline_ms_default": 2000,
    }


async def test_a_snapshot_holds_every_part_with_the_meanings_of_sysinfo() -> None:
    assert await snapshot(Machine(), {}) == {
        "ts_ms": NOW_MS,
        "node_id": NODE_ID,
        "uptime_s": 936,
        "cpu": {"cores": 2, "usage_pct": 50.0, "per_core_pct": [0.0, 100.0]},
        "mem": {
            "total_bytes": 8000,
            "available_bytes": 6000,
            "used_bytes": 2000,
            "swap_total_bytes": 2000,
            "swap_used_bytes": 1500,
        },
        "load": {"one": 0.09, "five": 1.5, "fifteen": 2.0},
        "disk": [{"mount": "/", "fs_type": "ext4", "total_bytes": 1000, "available_bytes": 400}],
    }


@pytest.mark.parametrize(
    "include", [[], ["uptime"], *([part] for part in sorted(ALL)), ["load", "cpu", "uptime"]]
)
async def test_include_chooses_the_parts(include: list[str]) -> None:
    assert set(await snapshot(Machine(), {"include": include})) == {*REQUIRED, *ALL.intersection(include)}


async def test_the_oddest_machine_still_fits_the_schema() -> None:
    machine = Machine()
    machine.cores = 5000
    machine.memory_now = MemoryReading(total=10, available=20, swap_total=0, swap_free=5)
    machine.mounted = [Mount(f"/dev/{n}", f"/media/\x1b\u202e{n}" + "y" * 400, "t" * 99) for n in range(99)]
    sample = await snapshot(machine, {})
    assert len(sample["cpu"]["per_core_pct"]) == sample["cpu"]["cores"] == 4096
    assert (sample["mem"]["used_bytes"], sample["mem"]["swap_used_bytes"]) == (0, 0)
    assert len(sample["disk"]) == 64


async def test_a_snapshot_before_the_first_interval_waits_for_it() -> None:
    first_interval = asyncio.Event()

    async def pause(seconds: float) -> None:
        await first_interval.wait()
        await only_the_first(seconds)

    handler = MetricsHandler(
        METRICS, NODE_ID, lambda: NOW_MS, LOG, readings=Machine(), sleep=pause, timeout_s=BOUND_S
    )
    asked = asyncio.create_task(handler.invoke("snapshot", {"include": ["cpu"]}))
    async with running(handler):
        await asyncio.sleep(0)
        assert not asked.done()
        first_interval.set()
        sample = await asyncio.wait_for(asked, BOUND_S)
    assert sample["cpu"]["usage_pct"] == 50.0


async def test_parts_that_are_not_known_in_time_are_left_out_and_not_made_up() -> None:
    handler = handler_of(Machine(), timeout_s=0.01)
    sample = await asyncio.wait_for(handler.invoke("snapshot", {}), BOUND_S)
    assert set(sample) == {*REQUIRED, "mem", "load"}


async def test_parts_that_need_no_sample_are_not_waited_for() -> None:
    handler = handler_of(Machine(), timeout_s=10 * BOUND_S)
    sample = await asyncio.wait_for(handler.invoke("snapshot", {"include": ["mem", "load"]}), BOUND_S)
    assert set(sample) == {*REQUIRED, "mem", "load"}


async def test_a_caller_that_goes_away_stops_the_wait() -> None:
    task = asyncio.create_task(handler_of(Machine()).invoke("snapshot", {}))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(task, BOUND_S)


async def test_this_machine_gives_a_valid_sample() -> None:
    handler = MetricsHandler(METRICS, NODE_ID, lambda: NOW_MS, LOG, timeout_s=BOUND_S)
    async with running(handler):
        sample = await handler.invoke("snapshot", {})
    SchemaRegistry().load("system.metrics.sample@1.0.0").check(sample)
    assert set(sample) == {*REQUIRED, *ALL}


@pytest.mark.holds("RFC-0001/5.4/sample-of-both-verbs")
async def test_samples_that_are_followed_have_the_cpu_usage_since_the_last_one() -> None:
    clock = Seconds()
    handler = MetricsHandler(
        METRICS, NODE_ID, lambda: NOW_MS, LOG, readings=Machine(), sleep=only_the_first, monotonic=clock
    )
    async with running(handler):
        for _ in range(2):
            sample = await handler.invoke("subscribe", {"interval_ms": 1000, "include": ["cpu"]})
            clock.now += 1
    assert sample["cpu"] == {"cores": 2, "usage_pct": 50.0, "per_core_pct": [0.0, 100.0]}
    SchemaRegistry().load(SYSTEM_METRICS.verbs["subscribe"].output_ref).check(sample)


class Counters:
    """CPU counters that step through what they are given; an exception in it is raised."""

    def __init__(self, *steps: Sequence[CpuTimes] | OSError) -> None:
        self._steps = iter(steps)

    def __call__(self) -> Sequence[CpuTimes]:
        step = next(self._steps)
        if isinstance(step, OSError):
            raise step
        return step


@pytest.mark.parametrize(
    ("before", "after", "usage"),
    [
        pytest.param([(10, 100), (20, 100)], [(11, 104), (23, 104)], (50.0, (25.0, 75.0)), id="of two CPUs"),
        pytest.param([(0, 0)], [(1, 3)], (33.33, (33.33,)), id="two decimals"),
        pytest.param([(10, 100)] * 3, [(9, 101), (12, 101), (11, 99)], (100.0, (0.0, 100.0, 0.0)), id="back"),
        pytest.param([(10, 100)] * 2, [(10, 100), (11, 102)], (50.0, (0.0, 50.0)), id="one stands still"),
        pytest.param([], [], None, id="no CPU"),
        pytest.param([], [(5, 10)], None, id="no reading before"),
        pytest.param([(0, 0)], [(1, 2), (1, 2)], None, id="a CPU came"),
        pytest.param([(5, 10)], [(5, 10)], None, id="no time has passed"),
        pytest.param([(5, 10)], [(1, 2)], None, id="counters began anew"),
    ],
)
def test_usage_is_work_by_total_over_all_cpus_and_for_each_where_readings_make_an_interval(
    before: list[tuple[float, float]], after: list[tuple[float, float]], usage: tuple[object, ...] | None
) -> None:
    assert usage_between([CpuTimes(*each) for each in before], [CpuTimes(*each) for each in after]) == usage


async def test_the_first_interval_is_short_and_the_others_are_not() -> None:
    pauses = Pauses()
    counters = Counters([CpuTimes(0, 0)], [CpuTimes(1, 4)], [CpuTimes(4, 8)])
    sampler = CpuSampler(counters, sleep=pauses.sleep)
    task = asyncio.create_task(sampler.run())

    pause = await pauses.next()
    assert (pause.seconds, sampler.latest, sampler.first.is_set()) == (FIRST_INTERVAL_S, None, False)
    pause.end()
    pause = await pauses.next()
    assert (pause.seconds, sampler.first.is_set()) == (INTERVAL_S, True)
    assert sampler.latest == CpuUsage(25.0, (25.0,))
    pause.end()
    await pauses.next()
    assert sampler.latest == CpuUsage(75.0, (75.0,))
    task.cancel()


async def test_counters_that_cannot_be_read_leave_the_last_usage_standing() -> None:
    pauses = Pauses()
    counters = Counters([CpuTimes(0, 0)], [CpuTimes(1, 4)], OSError(), [CpuTimes(7, 12)])
    sampler = CpuSampler(counters, sleep=pauses.sleep)
    task = asyncio.create_task(sampler.run())

    for _ in range(2):
        (await pauses.next()).end()
    pause = await pauses.next()
    assert sampler.latest == CpuUsage(25.0, (25.0,))
    pause.end()
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
