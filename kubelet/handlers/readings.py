"""The resources of this machine, read from ``/proc`` and ``statvfs``.

The numbers mean what the Rust crate ``sysinfo`` means by them (RFC-0001, decision 8). Read here and not with
psutil, of which a node would use a tenth and keep a mebibyte. Must not keep anything between two readings:
rates and last lists are the samplers' business.
"""

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

_OCTAL = re.compile(r"\\([0-7]{3})")


class CpuTimes(NamedTuple):
    """Seconds since boot of one CPU: at work, and in total."""

    work: float
    total: float


class MemoryReading(NamedTuple):
    """Bytes of memory and swap."""

    total: int
    available: int
    swap_total: int
    swap_free: int


class Mount(NamedTuple):
    """A mounted file system. All three strings are of foreign origin."""

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
        ticks_per_s = os.sysconf("SC_CLK_TCK")
        # The first line is the sum of all CPUs.
        lines = self._text("stat").splitlines()[1:]
        ticks = (map(int, line.split()[1:]) for line in lines if line.startswith("cpu"))
        return [summed([count / ticks_per_s for count in counts]) for counts in ticks]

    def memory(self) -> MemoryReading:
        """Return the state of memory and swap."""
        rows = (line.split() for line in self._text("meminfo").splitlines())
        size = {row[0]: int(row[1]) * 1024 for row in rows}
        # In a container the two may be of different origin.
        available = min(size["MemAvailable:"], size["MemTotal:"])
        return MemoryReading(size["MemTotal:"], available, size["SwapTotal:"], size["SwapFree:"])

    def load(self) -> tuple[float, float, float]:
        """Return the load averages over 1, 5 and 15 minutes."""
        return os.getloadavg()

    def uptime_s(self) -> int:
        """Return whole seconds since boot."""
        return int(self._text("uptime").partition(".")[0])

    def mounts(self) -> Sequence[Mount]:
        """Return what is mounted from block devices, in the order of mounting."""
        types = {line.lstrip() for line in self._text("filesystems").splitlines() if line.startswith("\t")}
        # A pool of ZFS is on block devices that the kernel does not know of.
        types.add("zfs")
        # Not splitlines(): paths may hold what it takes for the end of a line.
        rows = (line.split(" ") for line in self._text("self/mounts").split("\n") if line)
        mounts = (Mount(*(_unescaped(field) for field in row[:3])) for row in rows)
        return [mount for mount in mounts if mount.fs_type in types and mount.device not in ("", "none")]

    def space(self, path: str) -> Space:
        """Return the space of the file system at ``path``."""
        stat = os.statvfs(path)
        return Space(stat.f_blocks * stat.f_frsize, stat.f_bavail * stat.f_frsize)

    def _text(self, name: str) -> str:
        # Paths need not be UTF-8, and must lead to the same bytes again.
        return (self._proc / name).read_text(encoding="utf-8", errors="surrogateescape")


def summed(times: Sequence[float]) -> CpuTimes:
    """Return the columns of ``/proc/stat`` as ``sysinfo`` sums them up.

    Waiting for I/O is idling. The kernel counts a guest's time in ``user`` (``nice``) as well: it is taken
    out there, and, like time stolen by the host, belongs to the total but is not this system's own work.
    """
    user, nice, system, idle, iowait, irq, softirq, steal, guest, guest_nice = times[:10]
    work = user - guest + nice - guest_nice + system + irq + softirq
    return CpuTimes(work, work + guest + guest_nice + steal + idle + iowait)


def _unescaped(field: str) -> str:
    """Undo the kernel's escapes: a blank is written as a backslash and 040."""
    return _OCTAL.sub(lambda match: chr(int(match[1], 8)), field)
