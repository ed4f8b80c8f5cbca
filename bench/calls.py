"""What a relay carries beside the SDK's bare handler: calls a second, time and CPU time per call.

A thousand mock nodes in one process take the calls in turn, so that echo's own ten a second is not the
bound. The two servers are processes of their own, measured in alternation, so that what else the machine does
meets both. Of the relay the time of its own process counts: what the nodes and the load generator use is not
in it.
"""

import asyncio
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from bench.bare_server import TOOL
from bench.load import (
    Load,
    Target,
    carried,
    latencies_ms,
    old_tool_call,
    open_old_session,
    tool_call,
)
from bench.results import Figure
from relay.cli.demo.local_system import LocalSystem, Plan, issue_token, start_system
from relay.cli.demo.processes import Processes

NODES = 1000
CONNECTIONS = 32

_ROUNDS = 5
_WARM_UP_S = 1.5
_ROUND_S = 3.0
_LATENCY_CALLS = 400
_READY_TIMEOUT_S = 120
_REFERENCE = "SDK bare echo handler, SSE mode, no hop"


@dataclass(frozen=True, slots=True, eq=False)
class _Server:
    """One of the two, as its process and as what is sent to it in each era."""

    process: psutil.Process
    modern: Target
    old: Target

    def cpu_s(self) -> float:
        """Return how much CPU time its process has used, its own and the system's."""
        times = self.process.cpu_times()
        return float(times.user + times.system)


async def measure_calls() -> list[Figure]:
    """Return ``calls_per_s_c32``, ``relay_cpu_us_per_call``, ``call_p50_c1``, ``old_era_calls_per_s``."""
    with tempfile.TemporaryDirectory(prefix="edge-kubelet-bench-") as name:
        directory = Path(name)
        async with Processes.running(directory) as processes:
            bare_port = processes.ports.take(8690)
            await processes.start("bare", [sys.executable, "-P", "-m", "bench.bare_server", str(bare_port)])
            async with asyncio.timeout(_READY_TIMEOUT_S):
                plan = Plan.below(directory, processes.ports)
                system = await start_system(plan, NODES, processes, lambda _text: None)
                await processes.until_listening(bare_port)
                ours = await _relay(system, processes)
                bare = await _bare(bare_port, processes)
            modern = await _rounds([(ours, ours.modern), (bare, bare.modern)])
            old = await _rounds([(ours, ours.old), (bare, bare.old)])
            return [
                _per_second("calls_per_s_c32", modern, "ratio >= 1.6"),
                _cpu_per_call(modern),
                await _latency(ours.modern, bare.modern),
                _per_second("old_era_calls_per_s", old, "ratio >= 0.6"),
            ]


async def _relay(system: LocalSystem, processes: Processes) -> _Server:
    tools = [
        tool.name
        for tool in await system.until_listed()
        if ".echo." in tool.name and system.real_node not in tool.name
    ]
    port = system.plan.relay_port
    # Each connection is an agent of its own: what one may take is bounded.
    tokens = [issue_token(system.plan, f"agent-{number}") for number in range(CONNECTIONS)]
    sessions = [await open_old_session(port, token) for token in tokens]
    modern, old = [], []
    for number, tool in enumerate(tools):
        agent = number % CONNECTIONS
        modern.append(tool_call(port, tool, tokens[agent]))
        old.append(old_tool_call(port, tool, tokens[agent], sessions[agent]))
    return _Server(psutil.Process(processes.pid("relay")), Target(port, modern), Target(port, old))


async def _bare(port: int, processes: Processes) -> _Server:
    sessions = [await open_old_session(port, None) for _ in range(CONNECTIONS)]
    return _Server(
        psutil.Process(processes.pid("bare")),
        Target(port, [tool_call(port, TOOL, None)]),
        Target(port, [old_tool_call(port, TOOL, None, session) for session in sessions]),
    )


@dataclass(frozen=True, slots=True)
class _Round:
    """What one server has carried, and the CPU time that its process has used for it."""

    load: Load
    cpu_s: float

    @property
    def per_second(self) -> float:
        return self.load.calls / self.load.seconds

    @property
    def cpu_us_per_call(self) -> float:
        return self.cpu_s / self.load.calls * 1e6


async def _rounds(targets: Sequence[tuple[_Server, Target]]) -> list[list[_Round]]:
    """Return the rounds of each target, which were made in alternation."""
    for _, target in targets:
        await carried(target, CONNECTIONS, _WARM_UP_S)
    found: list[list[_Round]] = [[] for _ in targets]
    for _ in range(_ROUNDS):
        for (server, target), rounds in zip(targets, found, strict=True):
            before = server.cpu_s()
            load = await carried(target, CONNECTIONS, _ROUND_S)
            rounds.append(_Round(load, server.cpu_s() - before))
    return found


def _per_second(name: str, rounds: list[list[_Round]], wanted: str) -> Figure:
    ours, bare = (statistics.median(one.per_second for one in each) for each in rounds)
    return Figure(name, ours, "calls/s", _REFERENCE, bare, wanted)


def _cpu_per_call(rounds: list[list[_Round]]) -> Figure:
    ours, bare = (statistics.median(one.cpu_us_per_call for one in each) for each in rounds)
    return Figure("relay_cpu_us_per_call", ours, "us", _REFERENCE, bare, "ratio <= 0.5")


async def _latency(ours: Target, bare: Target) -> Figure:
    took: dict[Target, list[float]] = {ours: [], bare: []}
    for _ in range(_ROUNDS):
        for target, found in took.items():
            latest = await latencies_ms(target, _LATENCY_CALLS)
            found.extend(latest)
    return Figure(
        name="call_p50_c1",
        value=statistics.median(took[ours]),
        unit="ms",
        reference=_REFERENCE,
        reference_value=statistics.median(took[bare]),
        wanted="<= reference + 0.4 ms",
    )
