"""What it costs that each line of the audit is on the disk before its call is made.

Two relays, one with ``audit_sync = "always"``, on the disk of the temporary directory, in alternation.
"""

import asyncio
import statistics
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

from bench.load import Target, carried, latencies_ms, tool_call
from bench.results import Figure
from relay.cli.demo.local_system import Plan, issue_token, start_system
from relay.cli.demo.processes import Processes

NODES = 100
CONNECTIONS = 32
_ROUNDS = 5
_ROUND_S = 2.0
_LATENCY_CALLS = 200
_READY_TIMEOUT_S = 120
_REFERENCE = 'the same relay, audit_sync = "later"'


async def measure_audit_sync() -> list[Figure]:
    """Return ``audit_always_calls_per_s_c32`` and ``audit_always_call_p50_c1``."""
    async with _relay("always") as always, _relay("later") as later:
        found: list[tuple[Target, list[float], list[float]]] = [(always, [], []), (later, [], [])]
        for _ in range(_ROUNDS):
            for target, carries, takes in found:
                load = await carried(target, CONNECTIONS, _ROUND_S)
                carries.append(load.calls / load.seconds)
                takes.extend(await latencies_ms(target, _LATENCY_CALLS))
    per_second = [statistics.median(carries) for _, carries, _ in found]
    p50 = [statistics.median(takes) for _, _, takes in found]
    return [
        Figure("audit_always_calls_per_s_c32", per_second[0], "calls/s", _REFERENCE, per_second[1], "-"),
        Figure("audit_always_call_p50_c1", p50[0], "ms", _REFERENCE, p50[1], "-"),
    ]


@asynccontextmanager
async def _relay(sync: str) -> AsyncIterator[Target]:
    with tempfile.TemporaryDirectory(prefix="edge-kubelet-bench-") as name:
        async with Processes.running(Path(name)) as processes:
            async with asyncio.timeout(_READY_TIMEOUT_S):
                plan = replace(Plan.below(Path(name), processes.ports), relay_options=("--audit-sync", sync))
                system = await start_system(plan, NODES, processes, lambda _text: None)
                tools = [tool.name for tool in await system.until_listed() if ".echo." in tool.name]
            mock = [tool for tool in tools if system.real_node not in tool]
            tokens = [issue_token(plan, f"agent-{number}") for number in range(CONNECTIONS)]
            port = plan.relay_port
            calls = [tool_call(port, tool, tokens[number % CONNECTIONS]) for number, tool in enumerate(mock)]
            yield Target(port, calls)
