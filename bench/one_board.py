"""What one board costs itself and its hub, as the README states it: memory, CPU and traffic.

The board has the kinds that its enrolment enables, and answers three calls in five minutes, once it has read
the lists of packages. Traffic is what the kernel has counted of its daemon's connections, with 52 bytes of
headers for each segment, and without TLS. Must not be used on a machine that does other work: what it
measures is small.
"""

import asyncio
import os
import re
import shutil
import subprocess

import psutil

from bench.demo_system import demo_system
from bench.results import Figure
from kubelet.cli.kinds import BY_ENROLMENT
from relay.cli.demo.local_system import LocalSystem

_SETTLE_S = 60.0
_CALLS = 3
_BETWEEN_S = 100.0
_HEADERS = 52
_DAY_S = 86_400
_TOOL = "health.{node}.health.snapshot"
_COUNTS = re.compile(r"\b(bytes_acked|bytes_received|segs_out|segs_in):(\d+)")


async def measure_one_board() -> list[Figure]:
    """Return memory in MiB and CPU in percent of daemon, hub and broker, and the daemon's MB a day."""
    # As programs are installed: with their modules compiled. Compiling them at each start takes memory.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    async with demo_system(0, BY_ENROLMENT) as system:
        kubelet, relay, broker = (
            psutil.Process(system.processes.pid(name)) for name in ("kubelet", "relay", "broker")
        )
        await asyncio.sleep(_SETTLE_S)
        sent, used = _traffic(kubelet.pid), [_cpu_s(each) for each in (kubelet, relay, broker)]
        await _call(system)
        of_s = _CALLS * _BETWEEN_S
        sent = _traffic(kubelet.pid) - sent
        cpu = [
            100 * (_cpu_s(each) - before) / of_s
            for each, before in zip((kubelet, relay, broker), used, strict=True)
        ]
        memory = [each.memory_info().rss / 2**20 for each in (kubelet, relay, broker)]
    names = ("board", "hub", "hub_broker")
    return [
        *(_figure(f"{name}_rss_mib", mib, "MiB", memory[0]) for name, mib in zip(names, memory, strict=True)),
        *(_figure(f"{name}_cpu_pct", pct, "%", cpu[0]) for name, pct in zip(names, cpu, strict=True)),
        _figure("board_traffic_mb_a_day", sent * _DAY_S / of_s / 1e6, "MB", sent * _DAY_S / of_s / 1e6),
    ]


async def _call(system: LocalSystem) -> None:
    name = _TOOL.format(node=system.real_node)
    for _ in range(_CALLS):
        async with system.client() as client:
            result = await client.call_tool(name, {})
        if result.is_error:
            raise RuntimeError(f"{name}: {result.content}")
        await asyncio.sleep(_BETWEEN_S)


def _figure(name: str, value: float, unit: str, of_the_board: float) -> Figure:
    # A daemon that has slept all the time has used nothing; the divisor of a ratio must not be 0.
    return Figure(name, value, unit, "the board's daemon", max(of_the_board, 0.01), "reported")


def _cpu_s(process: psutil.Process) -> float:
    """Return what the process and the children that it has waited for have used."""
    times = process.cpu_times()
    return float(times.user + times.system + times.children_user + times.children_system)


def _traffic(pid: int) -> int:
    """Return the bytes that the open connections of a process have sent and received, with headers."""
    program = shutil.which("ss") or "/usr/bin/ss"
    listed = subprocess.run([program, "-HtinpO"], check=True, capture_output=True, text=True).stdout
    counts = [
        (name, int(count))
        for line in listed.splitlines()
        if f"pid={pid}," in line
        for name, count in _COUNTS.findall(line)
    ]
    return sum(count * (_HEADERS if name.startswith("segs") else 1) for name, count in counts)
