"""How long a call of a good client takes beside a thousand slow ones, and how long without them."""

import asyncio
import itertools
import statistics
import sys

from bench.demo_system import demo_system
from bench.load import Target, latencies_ms, tool_call
from bench.results import Figure
from relay.cli.demo.local_system import issue_token
from schemas.files import PRIVATE, write_atomic

_NODES = 200
_AGENTS = 8
_SLOW_CLIENTS = 1000
_WARM_UP_CALLS = 200
_CALLS = 1500
_PAUSE_S = 0.01
"""With it the calls last until the timeouts of the slow clients have passed, more than once."""
_READY_TIMEOUT_S = 120


async def measure_slow_clients() -> Figure:
    """Return ``slow_clients_p99_ms``."""
    async with demo_system(_NODES) as system:
        tools, processes = await system.until_listed(), system.processes
        port = system.plan.relay_port
        # Mock nodes in turn, so that echo's own ten a second is not the bound.
        names = [tool.name for tool in tools if ".echo." in tool.name and system.real_node not in tool.name]
        # And agents in turn, for what one may take is bounded too.
        tokens = itertools.cycle(issue_token(system.plan, f"agent-{n}") for n in range(_AGENTS))
        target = Target(
            port, [tool_call(port, tool, token) for tool, token in zip(names, tokens, strict=False)]
        )
        await latencies_ms(target, _WARM_UP_CALLS)
        alone = await latencies_ms(target, _CALLS, _PAUSE_S)
        token_file, ready_port = system.plan.directory / "token", processes.ports.take()
        write_atomic(token_file, system.token, PRIVATE)
        slow = [sys.executable, "-P", "-m", "bench.slow", str(port), str(_SLOW_CLIENTS), str(token_file)]
        await processes.start("slow", [*slow, str(ready_port)])
        async with asyncio.timeout(_READY_TIMEOUT_S):
            await processes.until_listening(ready_port)
        beside = await latencies_ms(target, _CALLS, _PAUSE_S)
    return Figure(
        name="slow_clients_p99_ms",
        value=_p99(beside),
        unit="ms",
        reference="the same client alone",
        reference_value=_p99(alone),
        wanted="<= 250 ms",
    )


def _p99(values: list[float]) -> float:
    return statistics.quantiles(values, n=100)[98]
