"""How long calls take while a node of another tenant floods the relay, and how soon it is cut off."""

import asyncio
import itertools
import os
import statistics
import sys
import time

from bench.demo_system import demo_system
from bench.load import Target, call_once, latencies_ms, tool_call
from bench.results import Figure
from relay.cli.demo.local_system import LocalSystem, issue_token
from relay.pki.authority import CertificateAuthority

_NODES = 200
_AGENTS = 8
_WARM_UP_CALLS = 200
_CALLS = 1000
_PAUSE_S = 0.01
_READY_TIMEOUT_S = 120
_TENANT = "flooding"


async def measure_flooded() -> list[Figure]:
    """Return ``flooded_p99_ms`` and ``flooded_shutout_ms``."""
    async with demo_system(_NODES) as system:
        plan, processes, directory = system.plan, system.processes, system.plan.directory
        target = await _others(system)
        await latencies_ms(target, _WARM_UP_CALLS)
        quiet = await latencies_ms(target, _CALLS, _PAUSE_S)
        ca = CertificateAuthority(plan.state.ca, lambda: time.time_ns() // 1_000_000, os.urandom)
        (node_id,) = ca.issue_mock(1, directory / "flooding", _TENANT)
        ready_port = processes.ports.take()
        flood = [sys.executable, "-P", "-m", "bench.flood", str(directory / "flooding" / node_id)]
        await processes.start("flood", [*flood, plan.public_url, str(ready_port)])
        async with asyncio.timeout(_READY_TIMEOUT_S):
            await processes.until_listening(ready_port)
        flooded = await latencies_ms(target, _CALLS, _PAUSE_S)
        token = issue_token(plan, "flooding", _TENANT)
        call = tool_call(plan.relay_port, f"sysecho.{node_id}.echo.invoke", token)
        before = await call_once(plan.relay_port, call)
        if b"E_ATTESTATION_FAILED" in before or b"E_SAFETY_DENIED" in before:
            raise RuntimeError(f"the node was shut out before it was revoked: {before!r}")
        await asyncio.to_thread(ca.revoke, node_id)
        shut_out_ms = await _ms_until_shut_out(plan.relay_port, call)
    return [
        Figure("flooded_p99_ms", _p99(flooded), "ms", "the same calls before", _p99(quiet), "ratio <= 3"),
        Figure("flooded_shutout_ms", shut_out_ms, "ms", "the second that is promised", 1000.0, "<= 1000 ms"),
    ]


async def _others(system: LocalSystem) -> Target:
    """Return calls of the nodes that do not flood, in turn, by agents in turn: one alone is limited."""
    names = [
        tool.name
        for tool in await system.until_listed()
        if ".echo." in tool.name and system.real_node not in tool.name
    ]
    tokens = itertools.cycle(issue_token(system.plan, f"agent-{n}") for n in range(_AGENTS))
    port = system.plan.relay_port
    return Target(port, [tool_call(port, tool, token) for tool, token in zip(names, tokens, strict=False)])


async def _ms_until_shut_out(port: int, call: bytes) -> float:
    """Return when ``call`` is refused. A node that only floods lets calls wait, so there are many."""
    shut_out = asyncio.Event()

    async def ask() -> None:
        if b"E_ATTESTATION_FAILED" in await call_once(port, call):
            shut_out.set()

    started = time.perf_counter()
    async with asyncio.timeout(_READY_TIMEOUT_S), asyncio.TaskGroup() as tasks:
        while not shut_out.is_set():
            tasks.create_task(ask())
            await asyncio.sleep(_PAUSE_S)
        took_s = time.perf_counter() - started
    return took_s * 1000


def _p99(values: list[float]) -> float:
    return statistics.quantiles(values, n=100)[98]
