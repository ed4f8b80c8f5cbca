"""The resources of this machine, read through psutil and ``/proc``.

The numbers mean what the Rust crate ``sysinfo`` means by them (RFC-0001, decision 8). Must not keep anything
between two readings: rates and last lists are the samplers' business.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

import psutil

if TYPE_CHECKING:
    from psutil._ntuples import scputimes


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


class Mount(NamedTuple):
    """A file system where it is mounted. All three strings are of foreign origin."""

    device: str
    path: str
    fs_type: str


class Space(NamedTuple):
    """Bytes of a file system, and how many of them are free for an unprivileged user."""

    total: int
    available: int


class Readings(Protocol):
    """What can be read; each method may raise OSError."""

    def cpu_times(self) -> Sequence[CpuTimes]:
        """Return the times of each logical CPU."""

    def memory(self) -> MemoryReading:
        """Return the state of memory and swap."""

    def load(self) -> tuple[float, float, float]:
        """Return the load averages over 1, 5 and 15 minutes."""

    def uptime_s(self) -> int:
        """Return whole seconds since boot."""

    def mounts(self) -> Sequence[Mount]:
        """Return what is mounted from block devices, in the order of mounting; may block."""

    def space(self, path: str) -> Space:
        """Return the space of the file system at ``path``; may block without end."""


class LinuxReadings:
    """The readings of the machine that this process runs on."""

    def __init__(self, proc: Path = Path("/proc")) -> None:
        self._proc = proc

    def cpu_times(self) -> Sequence[CpuTimes]:
        """Return the times of each logical CPU."""
        return [summed(times) for times in psutil.cpu_times(percpu=True)]

    def memory(self) -> MemoryReading:
        """Return the state of memory and swap."""
        memory = psutil.virtual_memory()
        swap = psutil.swap_memory()
        return MemoryReading(memory.total, memory.available, swap.total, swap.free)

    def load(self) -> tuple[float, float, float]:
        """Return the load averages over 1, 5 and 15 minutes."""
        return os.getloadavg()

    def uptime_s(self) -> int:
        """Return whole seconds since boot."""
        # psutil only has the boot time, and wall clock minus that moves with every correction of the clock.
        return int((self._proc / "uptime").read_text(encoding="ascii").partition(".")[0])

    def mounts(self) -> Sequence[Mount]:
        """Return what is mounted from block devices, in the order of mounting."""
        return [Mount(part.device, part.mountpoint, part.fstype) for part in psutil.disk_partitions()]

    def space(self, path: str) -> Space:
        """Return the space of the file system at ``path``."""
        stat = os.statvfs(path)
        return Space(stat.f_blocks * stat.f_frsize, stat.f_bavail * stat.f_frsize)


def summed(times: "scputimes") -> CpuTimes:
    """Return ``times`` as ``sysinfo`` sums them up.

    Waiting for I/O is idling. The kernel counts a guest's time in ``user`` (``nice``) as well: it is taken
    out there, and, like time stolen by the host, belongs to the total but is not this system's own work.
    """
    work = times.user - times.guest + times.nice - times.guest_nice
    work += times.system + times.irq + times.softirq
    rest = times.guest + times.guest_nice + times.steal
    return CpuTimes(work, work + times.idle + times.iowait + rest)
