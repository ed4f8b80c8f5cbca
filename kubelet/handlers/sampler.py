"""CPU usage over intervals that the daemon measures itself, so that a snapshot need not wait for one.

Must not read anything but the counters that it is given, and must not take a snapshot.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import NamedTuple

from kubelet.handlers.readings import CpuTimes

FIRST_INTERVAL_S = 0.25
"""Short, so that a node has a sample soon after its start."""

INTERVAL_S = 5.0
SHORTEST_INTERVAL_S = 0.5
"""Counters advance a hundred times a second: a shorter interval says little."""
LONGEST_INTERVAL_S = 90.0


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
        """Measure one interval after the other, until cancelled."""
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
