"""``system.metrics``: CPU, memory, load, uptime and disks of this node (RFC-0001 section 5).

Must not block: what takes time, or may never answer, is sampled in the background by ``run``, and a snapshot
takes the last values.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection, Mapping
from contextlib import suppress
from typing import Any

from structlog.typing import FilteringBoundLogger

from kubelet.handlers.base import BuiltInHandler, HandlerFactory
from kubelet.handlers.disks import Disks
from kubelet.handlers.readings import LinuxReadings, MemoryReading, Readings
from kubelet.handlers.sampler import CpuMeter, CpuSampler, CpuUsage
from schemas.health import endless

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
        readings: Readings | None = None,
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
        """Sample CPU usage and disks for as long as the daemon runs."""
        async with asyncio.TaskGroup() as group:
            group.create_task(endless("cpu", self._cpu.run()))
            group.create_task(endless("disks", self._disks.run()))

    async def invoke(self, verb: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Return a ``MetricsSample`` with the parts that ``include`` names, by default all.

        Samples of ``subscribe`` are taken at short intervals: the CPU usage of one is that since the last.
        """
        include = arguments.get("include", ALL_PARTS)
        await self._first_samples(include)
        sample: dict[str, Any] = {
            "ts_ms": self.now_ms(),
            "node_id": self.node_id,
            "uptime_s": self._readings.uptime_s(),
        }
        if "cpu" in include:
            usage = self._followed_cpu.usage() if verb == "subscribe" else None
            if (usage := usage or self._cpu.latest) is not None:
                sample["cpu"] = _cpu(usage)
        if "mem" in include:
            sample["mem"] = _mem(self._readings.memory())
        if "load" in include:
            averages = (round(average, 2) for average in self._readings.load())
            sample["load"] = dict(zip(("one", "five", "fifteen"), averages, strict=True))
        if "disk" in include and (disks := self._disks.latest) is not None:
            sample["disk"] = [disk._asdict() for disk in disks]
        return sample

    async def _first_samples(self, include: Collection[str]) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(self._timeout_s):
                if "cpu" in include:
                    await self._cpu.first.wait()
                if "disk" in include:
                    await self._disks.first.wait()


def _cpu(usage: CpuUsage) -> dict[str, Any]:
    return {
        "cores": min(len(usage.per_core), MAX_CORES),
        "usage_pct": usage.overall,
        "per_core_pct": list(usage.per_core[:MAX_CORES]),
    }


def _mem(memory: MemoryReading) -> dict[str, int]:
    return {
        "total_bytes": memory.total,
        "available_bytes": memory.available,
        # In a container the two can come from different worlds, and the difference can be negative.
        "used_bytes": max(memory.total - memory.available, 0),
        "swap_total_bytes": memory.swap_total,
        "swap_used_bytes": max(memory.swap_total - memory.swap_free, 0),
    }


HANDLER: HandlerFactory = MetricsHandler
