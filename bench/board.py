"""What the kinds of a Linux board cost it: CPU of an answer and of a minute, memory, and a large journal.

The programs are this machine's; where systemd does not run, ``systemctl`` is one that prints as many units as
a usual board has. Must not be used on a machine that does other work: what it measures is small.
"""

import asyncio
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
from mcp.client.client import Client

from bench.demo_system import demo_system
from bench.journal import large_journal
from bench.results import Figure
from kubelet.handlers.linux_journal import SEARCH_S
from kubelet.handlers.machine import printed_by
from relay.cli.demo.local_system import LocalSystem
from schemas.kinds import RFC_0001, shipped_names

KINDS = tuple(name for name in shipped_names() if name not in RFC_0001)
_ANSWERS = 20
_PAUSE_S = 0.6
"""Two a second is what the capability announces."""
_MINUTE_S = 65.0
_SETTLE_S = 5.0
_UNITS = 250
_SYSTEMD = Path("/run/systemd/system")
_UNIT = (
    "Id=unit-{n:03}.service\nActiveState=active\nSubState=running\nResult=success\nNRestarts=0\n"
    "StateChangeTimestampMonotonic=60000000\n\n"
)
_PLAIN = "the same node without kinds"


async def measure_board() -> list[Figure]:
    """Return ``health_cpu_ms``, ``health_minute_pct``, ``kubelet_kinds_rss_mib`` and ``journal_4gib_s``."""
    # As a node is installed: with its modules compiled. Compiling them at each start takes memory and time.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    with _systemctl():
        async with demo_system(0) as system:
            kubelet = psutil.Process(system.processes.pid("kubelet"))
            metrics_ms = await _answer_ms(system, kubelet, "sys.{node}.sysmetrics.snapshot")
            rest_s = await _minute_s(kubelet)
            plain_mib = kubelet.memory_info().rss / 2**20
        async with demo_system(0, KINDS) as system:
            kubelet = psutil.Process(system.processes.pid("kubelet"))
            health_ms = await _answer_ms(system, kubelet, "health.{node}.health.snapshot")
            kinds_mib = kubelet.memory_info().rss / 2**20
        # Alone: what linux.packages asks of a package manager is once for each change of its lists.
        async with demo_system(0, ("linux.health",)) as system:
            sampled_s = await _minute_s(psutil.Process(system.processes.pid("kubelet")))
    # All that the node uses in the minute: a tick of the kernel's clock is as much as the sampling.
    sampled_pct, rest_pct = 100 * sampled_s / _MINUTE_S, 100 * rest_s / _MINUTE_S
    return [
        Figure("health_cpu_ms", health_ms, "ms", "system.metrics snapshot", max(metrics_ms, 0.01), "<= 60"),
        Figure("health_minute_pct", sampled_pct, "%", _PLAIN, max(rest_pct, 0.01), "<= 0.2"),
        Figure("kubelet_kinds_rss_mib", kinds_mib, "MiB", _PLAIN, plain_mib, "<= 41"),
        *await _journal(),
    ]


async def _journal() -> list[Figure]:
    """Return how long a search that finds nothing takes in a large journal, beside its limit."""
    with tempfile.TemporaryDirectory(prefix="edge-kubelet-journal-") as name:
        size = await asyncio.to_thread(large_journal, Path(name))
        if size is None:
            print("left out: a large journal is written by systemd-journald, as root")
            return []
        command = ["journalctl", f"--directory={name}", "--quiet", "--no-pager", "--reverse", "--output=json"]
        began = time.perf_counter()
        await printed_by([*command, "--lines=51", "--grep=nothing has this"], 4 * 2**20, SEARCH_S)
        took_s = time.perf_counter() - began
    of = f"the time after which it answers ({size / 2**30:.1f} GiB)"
    return [Figure("journal_4gib_s", took_s, "s", of, SEARCH_S, "<= 4.5")]


async def _answer_ms(system: LocalSystem, process: psutil.Process, tool: str) -> float:
    """Return the CPU that an answer takes, its children's too, without what the process uses at rest."""
    name = tool.replace("{node}", system.real_node)
    async with system.client() as client:
        await _asked(client, name)
        at_rest = await _used_s(process, _SETTLE_S)
        before, began = _cpu_s(process), time.perf_counter()
        for _ in range(_ANSWERS):
            await _asked(client, name)
            await asyncio.sleep(_PAUSE_S)
        used = _cpu_s(process) - before - at_rest * (time.perf_counter() - began) / _SETTLE_S
    return 1000 * max(used, 0.0) / _ANSWERS


async def _asked(client: Client, name: str) -> None:
    result = await client.call_tool(name, {})
    if result.is_error:
        raise RuntimeError(f"{name}: {result.content}")


def _cpu_s(process: psutil.Process) -> float:
    """Return what the process and the children that it has waited for have used."""
    times = process.cpu_times()
    return float(times.user + times.system + times.children_user + times.children_system)


async def _used_s(process: psutil.Process, for_s: float) -> float:
    before = _cpu_s(process)
    await asyncio.sleep(for_s)
    return _cpu_s(process) - before


async def _minute_s(process: psutil.Process) -> float:
    await asyncio.sleep(_SETTLE_S)
    return await _used_s(process, _MINUTE_S)


@contextmanager
def _systemctl() -> Iterator[None]:
    """Put programs first on the path that print what systemd's would, where it does not run."""
    if _SYSTEMD.is_dir():
        yield
        return
    with tempfile.TemporaryDirectory(prefix="edge-kubelet-bin-") as name:
        units = "".join(_UNIT.format(n=number) for number in range(_UNITS))
        for program, text in (("systemctl", units), ("timedatectl", "yes\n")):
            (Path(name) / f"{program}.txt").write_text(text, "ascii")
            (Path(name) / program).write_text(f"#!/bin/sh\nexec cat {name}/{program}.txt\n", "ascii")
            (Path(name) / program).chmod(0o755)
        path = os.environ["PATH"]
        os.environ["PATH"] = f"{name}:{path}"
        try:
            yield
        finally:
            os.environ["PATH"] = path
