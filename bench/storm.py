"""How long 5 000 nodes that come back at once take to be back, and what a call takes meanwhile.

All of them lose the relay in one moment: their process is stopped until the relay has given up on each. The
node that is called is another one, and stays. Beside it, a bare server that as many connections are opened
to, as fast as they go.

And how long fifty nodes take to be back after the relay was away for two minutes, by the waits that they have
come to meanwhile. The two minutes are waited for.
"""

import asyncio
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import httpx2
import psutil
from websockets.asyncio.client import ClientConnection, connect

from bench.demo_system import demo_system
from bench.load import Target, latencies_ms, tool_call
from bench.metrics_page import metrics_client
from bench.results import Figure
from relay.cli.demo.local_system import TENANT, LocalSystem, Plan, fleet_command, relay_command, start_system
from relay.cli.demo.processes import Processes
from relay.pki.authority import CertificateAuthority
from relay.settings.environment import now_ms

_NODES = 5000
_TIMEOUT_S = 300
_POLL_S = 0.2
_PAUSE_S = 0.12  # below echo's own ten a second
_CALLS_BEFORE = 150
_OPENING_AT_ONCE = 50
_AWAY_NODES = 50
_AWAY_S = 120
_BACK_S = 45


async def measure_storm() -> list[Figure]:
    """Return ``reconnect_storm_5000_s``, ``storm_relay_cores`` and ``storm_call_p99_ms``."""
    with tempfile.TemporaryDirectory(prefix="edge-kubelet-bench-") as name:
        directory = Path(name)
        async with Processes.running(directory) as processes, asyncio.timeout(_TIMEOUT_S):
            bare_s = await _bare_s(processes)
            plan = Plan.below(directory, processes.ports)
            system = await start_system(plan, 0, processes, lambda _text: None)
            await system.until_listed()
            return await _storm(system, processes, bare_s)


async def measure_absence() -> Figure:
    """Return ``back_after_2_min_s``: from when the relay listens again until all of 50 nodes are there."""
    async with demo_system(_AWAY_NODES) as system, asyncio.timeout(_TIMEOUT_S):
        plan, processes = system.plan, system.processes
        await processes.kill("relay")
        await asyncio.sleep(_AWAY_S)
        await processes.start("relay", relay_command(plan))
        await processes.until_listening(plan.relay_port)
        started = time.perf_counter()
        async with metrics_client(plan.metrics) as http:
            await _until(http, processes, lambda connected: connected > _AWAY_NODES)
        took_s = time.perf_counter() - started
    return Figure("back_after_2_min_s", took_s, "s", "50 nodes, longest wanted", _BACK_S, "<= 45 s")


async def _storm(system: LocalSystem, processes: Processes, bare_s: float) -> list[Figure]:
    plan = system.plan
    ca = CertificateAuthority(plan.state.ca, now_ms, os.urandom)
    ca.issue_mock(_NODES, plan.mocks, TENANT)
    await processes.start("fleet", fleet_command(plan))
    port, tool = plan.relay_port, f"sysecho.{system.real_node}.echo.invoke"
    target = Target(port, [tool_call(port, tool, system.token)])
    async with metrics_client(plan.metrics) as http:
        await _until(http, processes, lambda connected: connected > _NODES)
        before = await latencies_ms(target, _CALLS_BEFORE, _PAUSE_S)
        fleet = processes.pid("fleet")
        os.kill(fleet, signal.SIGSTOP)
        await _until(http, processes, lambda connected: connected == 1)
        relay = psutil.Process(processes.pid("relay"))
        used, started = _cpu_s(relay), time.perf_counter()
        os.kill(fleet, signal.SIGCONT)
        back = asyncio.create_task(_until(http, processes, lambda connected: connected > _NODES))
        meanwhile: list[float] = []
        while not back.done():
            meanwhile += await latencies_ms(target, 1, _PAUSE_S)
        await back
        took_s = time.perf_counter() - started
        cores = (_cpu_s(relay) - used) / took_s
    return [
        Figure("reconnect_storm_5000_s", took_s, "s", "bare server, 5 000 connects", bare_s, "<= 60 s"),
        Figure("storm_relay_cores", cores, "cores", "one core", 1.0, "<= 1"),
        Figure(
            "storm_call_p99_ms", _p99(meanwhile), "ms", "the same call before", _p99(before), "<= 1000 ms"
        ),
    ]


async def _until(http: httpx2.AsyncClient, processes: Processes, enough: Callable[[float], bool]) -> None:
    while True:
        processes.check()
        lines = (await http.get("/metrics", timeout=_TIMEOUT_S)).text.splitlines()
        value = next(line for line in lines if line.startswith("edge_relay_nodes_connected "))
        if enough(float(value.rpartition(" ")[2])):
            return
        await asyncio.sleep(_POLL_S)


async def _bare_s(processes: Processes) -> float:
    port = processes.ports.take()
    await processes.start("bare", [sys.executable, "-P", "-m", "bench.bare_websockets", str(port)])
    await processes.until_listening(port)
    gate = asyncio.Semaphore(_OPENING_AT_ONCE)

    async def open_one() -> ClientConnection:
        async with gate:
            return await connect(f"ws://127.0.0.1:{port}", compression=None, ping_interval=None)

    started = time.perf_counter()
    connections = await asyncio.gather(*(open_one() for _ in range(_NODES)))
    took_s = time.perf_counter() - started
    await asyncio.gather(*(connection.close() for connection in connections))
    await processes.kill("bare")
    return took_s


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def _p99(values: list[float]) -> float:
    return statistics.quantiles(values, n=100)[98]
