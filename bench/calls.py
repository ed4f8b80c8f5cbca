"""How many calls a relay carries, and how long one takes, beside the SDK's bare handler.

A thousand mock nodes in one process take the calls in turn, so that echo's own ten a second is not the
bound. The two servers are measured in alternation, so that what else the machine does meets both.
"""

import asyncio
import itertools
import statistics
import sys
import tempfile
from pathlib import Path

from bench.bare_server import TOOL
from bench.load import Target, calls_per_second, latencies_ms, tool_call
from bench.results import Figure
from relay.demo.local_system import Plan, issue_token, start_system
from relay.demo.processes import Processes, free_port

_NODES = 1000
_CONNECTIONS = 32
_ROUNDS = 5
_WARM_UP_S = 1.5
_ROUND_S = 3.0
_LATENCY_CALLS = 400
_READY_TIMEOUT_S = 120


async def measure_calls() -> list[Figure]:
    """Return ``calls_per_s_c32`` and ``call_p50_c1``."""
    with tempfile.TemporaryDirectory(prefix="edge-kubelet-bench-") as name:
        directory = Path(name)
        async with Processes.running(directory) as processes:
            bare_port = free_port(8690)
            await processes.start("bare", [sys.executable, "-P", "-m", "bench.bare_server", str(bare_port)])
            async with asyncio.timeout(_READY_TIMEOUT_S):
                system = await start_system(Plan.below(directory), _NODES, processes, lambda _text: None)
                await processes.until_listening(bare_port)
                tools = await system.until_listed()
            port = system.plan.relay_port
            names = [
                tool.name for tool in tools if ".echo." in tool.name and system.real_node not in tool.name
            ]
            # Each connection is an agent of its own: what one may take is bounded.
            tokens = itertools.cycle(issue_token(system.plan, f"agent-{n}") for n in range(_CONNECTIONS))
            ours = Target(
                port, [tool_call(port, tool, token) for tool, token in zip(names, tokens, strict=False)]
            )
            bare = Target(bare_port, [tool_call(bare_port, TOOL, None)])
            return [await _throughput(ours, bare), await _latency(ours, bare)]


async def _throughput(ours: Target, bare: Target) -> Figure:
    rates: dict[Target, list[float]] = {ours: [], bare: []}
    for target in rates:
        await calls_per_second(target, _CONNECTIONS, _WARM_UP_S)
    for _ in range(_ROUNDS):
        for target, found in rates.items():
            rate = await calls_per_second(target, _CONNECTIONS, _ROUND_S)
            found.append(rate)
    return Figure(
        name="calls_per_s_c32",
        value=statistics.median(rates[ours]),
        unit="calls/s",
        reference="SDK bare echo handler, SSE mode, no hop",
        reference_value=statistics.median(rates[bare]),
        wanted="ratio >= 0.8",
    )


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
        reference="SDK bare echo handler, SSE mode, no hop",
        reference_value=statistics.median(took[bare]),
        wanted="<= reference + 0.4 ms",
    )
