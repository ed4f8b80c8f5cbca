"""``system.metrics``: CPU, memory, load, uptime and disks of this node (RFC-0001 section 5).

The numbers mean what the Rust crate ``sysinfo`` means by them (RFC-0001, decision 8). Must not block: what
takes time, or may never answer, is sampled in the background by ``run``; a snapshot takes the last values.
"""

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import psutil
from structlog.typing import FilteringBoundLogger

from kubelet.handlers.base import BuiltInHandler, HandlerFactory
from kubelet.handlers.disks import Disks, Mount, Space
from schemas.health import endless

if TYPE_CHECKING:
    from psutil._ntuples import scputimes

FIRST_INTERVAL_S = 0.25
"""Short, so that a node has a sample soon after its start."""

INTERVAL_S = 5.0
SHORTEST_INTERVAL_S = 0.5
"""Counters advance a hundred times a second: a shorter interval says little."""
LONGEST_INTERVAL_S = 90.0


class CpuTimes(NamedTuple):
    """Seconds that one CPU has spent since boot: at work, and altogether."""

    work: float
    total: float


class MemoryReading(NamedTuple):
    """Bytes of memory and swap."""

    total: int
    available: int
    swap_total: int
    swap_free: int


class LinuxReadings:
    """The readings of the machine that this process runs on; each method may raise OSError."""

    def __init__(self, proc: Path = Path("/proc")) -> None:
        self._proc = proc

    def cpu_times(self) -> Sequence[CpuTimes]:
        return [sum_times(times) for times in psutil.cpu_times(percpu=True)]

    def memory(self) -> MemoryReading:
        memory = psutil.virtual_memory()
        swap = psutil.swap_memory()
        return MemoryReading(memory.total, memory.available, swap.total, swap.free)

    def load(self) -> tuple[float, float, float]:
        return os.getloadavg()

    def uptime_s(self) -> int:
        # psutil only has the boot time, and wall clock minus that moves with every correction of the clock.
        return int((self._proc / "uptime").read_text(encoding="ascii").partition(".")[0])

    def mounts(self) -> Sequence[Mount]:
        """Return what is mounted from block devices, in the order of mounting; may block."""
        return [Mount(part.device, part.mountpoint, part.fstype) for part in psutil.disk_partitions()]

    def space(self, path: str) -> Space:
        """Return the space of the file system at ``path``; may block without end."""
        stat = os.statvfs(path)
        return Space(stat.f_blocks * stat.f_frsize, stat.f_bavail * stat.f_frsize)


def sum_times(times: "scputimes") -> CpuTimes:
    """Return ``times`` as ``sysinfo`` sums them up.

    Waiting for I/O is idling. The kernel counts a guest's time in ``user`` (``nice``) as well: it is taken
    out there, and, like time stolen by the host, belongs to the total but is not this system's own work.
    """
    work = times.user - times.guest + times.nice - times.guest_nice
    work += times.system + times.irq + times.softirq
    rest = times.guest + times.guest_nice + times.steal
    return CpuTimes(work, work + times.idle + times.iowait + rest)


class CpuUsage(NamedTuple):
    """Percent of one interval that the CPUs worked: all of them together, and each."""

    overall: float
    per_core: tuple[float, ...]


def usage_between(before: Sequence[CpuTimes], after: Sequence[CpuTimes]) -> CpuUsage | None:
    """Return the usage between two readings, or None where they do not make an interval.

    They do not when no time has passed, or when a CPU came or went: readings carry no CPU numbers.
    """
    if len(before) != len(after):
        return None
    work = [new.work - old.work for old, new in zip(before, after, strict=True)]
    total = [new.total - old.total for old, new in zip(before, after, strict=True)]
    if sum(total) <= 0:
        return None
    return CpuUsage(_percent(sum(work), sum(total)), tuple(map(_percent, work, total)))


def _percent(part: float, whole: float) -> float:
    # Kernels are known to let single counters run backwards by a tick.
    return round(min(max(100 * part / whole, 0.0), 100.0), 2) if whole > 0 else 0.0


class CpuMeter:
    """The usage between two requests for it. ``monotonic`` is in seconds."""

    def __init__(self, read: Callable[[], Sequence[CpuTimes]], monotonic: Callable[[], float]) -> None:
        self._read = read
        self._monotonic = monotonic
        self._before: Sequence[CpuTimes] = ()
        self._at = -LONGEST_INTERVAL_S
        self._usage: CpuUsage | None = None

    def usage(self) -> CpuUsage | None:
        """Return the usage since the last request, or of the interval before it where that is too short.

        None if there is no interval, or a long one: what was last requested minutes ago is over.
        """
        now = self._monotonic()
        passed, kept = now - self._at, self._usage
        if passed < SHORTEST_INTERVAL_S:
            return kept
        try:
            after = self._read()
        except OSError:
            return kept
        self._usage = usage_between(self._before, after) if passed <= LONGEST_INTERVAL_S else None
        self._before, self._at = after, now
        return self._usage


class CpuSampler:
    """Keeps the usage of the last full interval.

    Attributes:
        latest: that usage, or None while there has been no full interval.
        first: set when ``latest`` has a value.
    """

    def __init__(
        self,
        read: Callable[[], Sequence[CpuTimes]],
        *,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._read = read
        self._sleep = sleep
        self.latest: CpuUsage | None = None
        self.first = asyncio.Event()

    async def run(self) -> None:
        before: Sequence[CpuTimes] = ()
        while True:
            # Counters that cannot be read now leave the last usage in place.
            with suppress(OSError):
                after = self._read()
                if (usage := usage_between(before, after)) is not None:
                    self.latest = usage
                    self.first.set()
                before = after
            await self._sleep(FIRST_INTERVAL_S if self.latest is None else INTERVAL_S)


ALL_PARTS = ("cpu", "mem", "load", "uptime", "disk")
MAX_CORES = 4096

TIMEOUT_S = 1.0
"""How long a snapshot right after the start waits for the first samples."""


class MetricsHandler(BuiltInHandler):
    """Answers with a sample of the machine that ``readings`` reads, by default this one.

    A part that is not known, because its first sample has not come in time, is left out, not invented.
    """

    def __init__(  # noqa: PLR0913 - what comes in from outside
        self,
        capability: Mapping[str, Any],
        node_id: str,
        now_ms: Callable[[], int],
        log: FilteringBoundLogger,
        *,
        readings: LinuxReadings | None = None,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        monotonic: Callable[[], float] = time.monotonic,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        super().__init__(capability, node_id, now_ms, log)
        self._readings = readings or LinuxReadings()
        self._timeout_s = timeout_s
        self._cpu = CpuSampler(self._readings.cpu_times, sleep=sleep)
        self._followed_cpu = CpuMeter(self._readings.cpu_times, monotonic)
        self._disks = Disks(self._readings.mounts, self._readings.space, log, sleep=sleep)

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(endless("cpu", self._cpu.run()))
            group.create_task(endless("disks", self._disks.run()))

    async def invoke(self, verb: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Return a ``MetricsSample`` with the parts that ``include`` names, by default all.

        Samples of ``subscribe`` are taken at short intervals: the CPU usage of one is that since the last.
        """
        include = arguments.get("include", ALL_PARTS)
        with suppress(TimeoutError):
            async with asyncio.timeout(self._timeout_s):
                if "cpu" in include:
                    await self._cpu.first.wait()
                if "disk" in include:
                    await self._disks.first.wait()
        sample: dict[str, Any] = {
            "ts_ms": self.now_ms(),
            "node_id": self.node_id,
            "uptime_s": self._readings.uptime_s(),
        }
        if "cpu" in include:
            usage = self._followed_cpu.usage() if verb == "subscribe" else None
            if (usage := usage or self._cpu.latest) is not None:
                sample["cpu"] = {
                    "cores": min(len(usage.per_core), MAX_CORES),
                    "usage_pct": usage.overall,
                    "per_core_pct": list(usage.per_core[:MAX_CORES]),
                }
        if "mem" in include:
            memory = self._readings.memory()
            sample["mem"] = {
                "total_bytes": memory.total,
                "available_bytes": memory.available,
                # In a container the two can come from different worlds, and the difference can be negative.
                "used_bytes": max(memory.total - memory.available, 0),
                "swap_total_bytes": memory.swap_total,
                "swap_used_bytes": max(memory.swap_total - memory.swap_free, 0),
            }
        if "load" in include:
            averages = (round(average, 2) for average in self._readings.load())
            sample["load"] = dict(zip(("one", "five", "fifteen"), averages, strict=True))
        if "disk" in include and (disks := self._disks.latest) is not None:
            sample["disk"] = [disk._asdict() for disk in disks]
        return sample


HANDLER: HandlerFactory = MetricsHandler
