"""Samples what processes use, as Linux shows it, and their tasks, as their status does. Must not judge."""

import asyncio
import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

from schemas.process.status_socket import NotRunningError, StalledError, read_status
from tests.soak.slopes import Sample


@dataclass(frozen=True, slots=True)
class Watched:
    """A process that is sampled, and the directory of its status."""

    pid: int
    state: Path


def sampled(watched: Mapping[str, Watched], at_s: float) -> Iterator[Sample]:
    """Yield a sample of each process that answers. Blocks."""
    for name, one in watched.items():
        process = psutil.Process(one.pid)
        try:
            tasks = read_status(one.state)["tasks"]
        except (NotRunningError, StalledError):
            continue  # it answers the next time, or there are too few samples
        yield Sample(at_s, name, _anonymous_bytes(one.pid), process.num_fds(), process.num_threads(), tasks)


def _anonymous_bytes(pid: int) -> int:
    """Return what ``pid`` has allocated; private pages hold libraries that it alone maps."""
    rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
    sizes = re.findall(r"^(?:Anonymous|Swap):\s+(\d+) kB$", rollup, re.MULTILINE)
    return sum(map(int, sizes)) * 1024


async def keep_sampling(watched: Mapping[str, Watched], period_s: float, samples: list[Sample]) -> None:
    """Add to ``samples`` every ``period_s``, until cancelled."""
    began = due = time.monotonic()
    while True:
        samples += await asyncio.to_thread(lambda: list(sampled(watched, time.monotonic() - began)))
        due = max(due + period_s, time.monotonic())
        await asyncio.sleep(due - time.monotonic())
