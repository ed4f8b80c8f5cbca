"""What a relay carries beside the SDK's bare handler, in its default and its fastest mode, in each era.

A thousand mock nodes in one process take the calls in turn, so that echo's own ten a second is not the
bound. The servers are processes of their own, measured in alternation, so that what else the machine does
meets all. Of the relay the time of its own process counts: what the nodes and the load generator use is not
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

from bench.bare_server import FASTEST, TOOL
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
_DEFAULT = "SDK bare echo handler, default mode (SSE), no hop"
_FASTEST = "SDK bare echo handler, stateless and JSON, no hop"


@dataclass(frozen=True, slots=True, eq=False)
class _Server:
    """One of those that are compared, as its process and as what is sent to it in each era."""

    name: str
    process: psutil.Process
    modern: Target
    old: Target

    def cpu_s(self) -> float:
        """Return how much CPU time its process has used, its own and the system's."""
        times = self.process.cpu_times()
        return float(times.user + times.system)


async def measure_calls() -> list[Figure]:
    """Return calls a second, CPU time and latency of each era, beside both modes of the SDK."""
    with tempfile.TemporaryDirectory(prefix="edge-kubelet-bench-") as name:
        directory = Path(name)
        async with Processes.running(directory) as processes:
            async with asyncio.timeout(_READY_TIMEOUT_S):
                plan = Plan.below(directory, processes.ports)
                system = await start_system(plan, NODES, processes, lambda _text: None)
                ours = await _relay(system, processes)
                bare = [await _bare(_DEFAULT, processes), await _bare(_FASTEST, processes, FASTEST)]
            servers = (ours, *bare)
            modern = await _rounds([(server, server.modern) for server in servers])
            old = await _rounds([(server, server.old) for server in servers])
            modern_p50 = await _latencies([server.modern for server in servers])
            old_p50 = await _latencies([server.old for server in servers])
        return [
            *_per_second("calls_per_s_c32", modern, bare, "ratio >= 1.6", "reported"),
            *_cpu_per_call("relay_cpu_us_per_call", modern, bare, "ratio <= 0.5", "reported"),
            *_figures("call_p50_c1", "ms", modern_p50, bare, ("<= reference + 0.4 ms", "reported")),
            *_per_second("old_era_calls_per_s", old, bare, "ratio >= 0.6", "ratio >= 1.0"),
            *_cpu_per_call("old_era_cpu_us_per_call", old, bare, "reported", "ratio <= 1.0"),
            *_figures("old_era_call_p50_c1", "ms", old_p50, bare, ("reported", "<= reference + 0.3 ms")),
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
    relay = psutil.Process(processes.pid("relay"))
    return _Server("relay", relay, Target(port, modern), Target(port, old))


async def _bare(name: str, processes: Processes, *mode: str) -> _Server:
    port, program = processes.ports.take(), "-".join(("bare", *mode))
    await processes.start(program, [sys.executable, "-P", "-m", "bench.bare_server", str(port), *mode])
    await processes.until_listening(port)
    # Without sessions, the fastest mode takes a call of the older era by itself.
    sessions = [None] if mode else [await open_old_session(port, None) for _ in range(CONNECTIONS)]
    return _Server(
        name,
        psutil.Process(processes.pid(program)),
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


_Beside = Sequence[_Server]


def _figures(
    name: str, unit: str, values: Sequence[float], beside: _Beside, wanted: Sequence[str]
) -> list[Figure]:
    """Return the first of ``values`` beside each other one, which is that of a server of ``beside``."""
    suffixes = ("", "_fastest")
    return [
        Figure(name + suffix, values[0], unit, server.name, value, text)
        for suffix, server, value, text in zip(suffixes, beside, values[1:], wanted, strict=True)
    ]


def _per_second(name: str, rounds: list[list[_Round]], beside: _Beside, *wanted: str) -> list[Figure]:
    values = [statistics.median(one.per_second for one in each) for each in rounds]
    return _figures(name, "calls/s", values, beside, wanted)


def _cpu_per_call(name: str, rounds: list[list[_Round]], beside: _Beside, *wanted: str) -> list[Figure]:
    values = [statistics.median(one.cpu_us_per_call for one in each) for each in rounds]
    return _figures(name, "us", values, beside, wanted)


async def _latencies(targets: Sequence[Target]) -> list[float]:
    """Return the p50 of each target in milliseconds, of calls that were made in alternation."""
    took: list[list[float]] = [[] for _ in targets]
    for _ in range(_ROUNDS):
        for target, found in zip(targets, took, strict=True):
            found.extend(await latencies_ms(target, _LATENCY_CALLS))
    return [statistics.median(found) for found in took]
