"""What a process uses of its machine, and may use, by Linux. Must not decide whether that is too much."""

import asyncio
import os
import resource
import time
from collections.abc import Mapping
from pathlib import Path

import psutil

TRIM_INTERVAL_S = 600.0
_PAGE_BYTES = resource.getpagesize()


def resources(loop: asyncio.AbstractEventLoop) -> dict[str, int]:
    """Return what this process uses, and how many ``tasks`` of ``loop`` have not ended. Any thread may call.

    The rest: ``pid``, ``resident_bytes``, ``open_files`` and ``max_open_files``.
    """
    soft, _hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return {
        "pid": os.getpid(),
        "resident_bytes": int(Path("/proc/self/statm").read_text("ascii").split()[1]) * _PAGE_BYTES,
        "open_files": sum(1 for _ in Path("/proc/self/fd").iterdir()),
        "max_open_files": soft,
        "tasks": len(asyncio.all_tasks(loop)),
    }


def raise_open_files_limit() -> int:
    """Raise the limit of open files of this process and of those that it starts, and return it."""
    _soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard


async def keep_trimmed(interval_s: float = TRIM_INTERVAL_S) -> None:
    """Give what is free in the heap back every ``interval_s``, until cancelled.

    A process must not grow by its age: each connection that is lost and made again leaves holes. What it
    takes is freed, but lies below what is still in use, and the next one does not fit. glibc gives back only
    what is free at the end of the heap unless it is told to look; other C libraries do by themselves, or
    cannot: psutil has no such function then, nor before 7.2. docs/decisions/0108 and 0115 have the figures.
    """
    while True:
        await asyncio.sleep(interval_s)
        # Asked for only now: a relay that was just started has not loaded psutil.
        if trim := getattr(psutil, "heap_trim", None):
            trim()


def watchdog_s(environment: Mapping[str, str]) -> float | None:
    """Return the seconds of the service manager's watchdog; None if there is none."""
    text = environment.get("WATCHDOG_USEC", "")
    return int(text) / 1_000_000 if text.isdecimal() and int(text) > 0 else None


class Uptime:
    """Seconds since it was made."""

    def __init__(self) -> None:
        self._began_s = time.monotonic()

    def __call__(self) -> int:
        return int(time.monotonic() - self._began_s)
