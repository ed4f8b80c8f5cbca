"""How long calls take while a node of another tenant, a stranger or another agent floods the relay.

A flood over HTTP takes time of the machine whatever reads it: the reference is the same one at a server that
reads and drops it.
"""

import asyncio
import itertools
import os
import statistics
import sys
import time

from bench.demo_system import demo_system
from bench.load import KeptConnection, Target, call_once, latencies_ms, request_of, tool_call
from bench.results import Figure
from relay.cli.demo.local_system import LocalSystem, issue_token
from relay.pki.authority import CertificateAuthority
from relay.settings.environment import now_ms
from schemas.files import PRIVATE, write_atomic

_NODES = 200
_AGENTS = 8
_WARM_UP_CALLS = 200
_CALLS = 1000
_HTTP_CALLS = 300
_PAUSE_S = 0.01
_READY_TIMEOUT_S = 120
_TENANT = "flooding"
_PIPELINED = 8
_SETTLE_S = 2.0
"""What a flood may have at once is used up then."""
_LEAST_SENT = 0.1
"""The part of a flood that has to be sent: the relay refuses some connections of it, and cuts others off."""


async def measure_flooded() -> list[Figure]:
    """Return ``flooded_p99_ms`` and ``flooded_shutout_ms``."""
    async with demo_system(_NODES) as system:
        plan, processes, directory = system.plan, system.processes, system.plan.directory
        target = await _others(system)
        await latencies_ms(target, _WARM_UP_CALLS)
        quiet = await latencies_ms(target, _CALLS, _PAUSE_S)
        ca = CertificateAuthority(plan.state.ca, now_ms, os.urandom)
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


async def measure_flooded_over_http() -> list[Figure]:
    """Return ``flooded_heads_p99_ms`` and those of the other attacks over HTTP."""
    async with demo_system(_NODES) as system:
        port, processes = system.plan.relay_port, system.processes
        target = await _others(system)
        agent = KeptConnection(port)
        drop_port = processes.ports.take()
        await processes.start(
            "drop", [sys.executable, "-P", "-m", "bench.http_flood", "drop", str(drop_port)]
        )
        await processes.until_listening(drop_port)
        figures = []
        for name, (connections, said) in _attacks(system).items():
            dropped = await p99_beside(system, agent, target, (drop_port, connections, said))
            flooded = await p99_beside(system, agent, target, (port, connections, said))
            text = "the same flood at a server that drops it"
            figures.append(Figure(f"flooded_{name}_p99_ms", flooded, "ms", text, dropped, "ratio <= 3"))
    return figures


def _attacks(system: LocalSystem) -> dict[str, tuple[int, bytes]]:
    """Return from how many connections each attack comes, and what each of them sends."""
    port = system.plan.relay_port
    get = b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1:%d\r\n" % port
    token = issue_token(system.plan, "flooding")
    discover = request_of(port, token, "server/discover", {})
    refused = tool_call(port, "sysecho.nowhere.echo.invoke", token)
    return {
        "heads": (128, get + b"X: y\r\n" * 12_000 + b"\r\n"),
        "health": (400, (get + b"\r\n") * _PIPELINED),
        "discover": (200, discover * _PIPELINED),
        "refused": (200, refused * _PIPELINED),
    }


async def p99_beside(
    system: LocalSystem, agent: KeptConnection, target: Target, flood: tuple[int, int, bytes]
) -> float:
    """Return the p99 of an agent's calls beside ``flood``: to which port, from how many connections, what."""
    port, connections, said = flood
    processes, file = system.processes, system.plan.directory / "said"
    write_atomic(file, said, PRIVATE)
    ready_port = processes.ports.take()
    turns = itertools.cycle(target.requests)
    for _ in range(_WARM_UP_CALLS):
        await agent.ask(next(turns))
    name = f"flood-{ready_port}"
    command = [sys.executable, "-P", "-m", "bench.http_flood", "flood", str(port), str(file)]
    await processes.start(name, [*command, str(connections), str(ready_port)])
    await processes.until_listening(ready_port)
    await asyncio.sleep(_SETTLE_S)
    took, began_s, sent_before = [], time.perf_counter(), await _sent(ready_port)
    for _ in range(_HTTP_CALLS):
        started = time.perf_counter()
        body = await agent.ask(next(turns))
        took.append((time.perf_counter() - started) * 1000)
        if b'"isError":false' not in body:
            raise RuntimeError(f"a call failed: {body[:500]!r}")
        await asyncio.sleep(_PAUSE_S)
    sent, wanted = await _sent(ready_port) - sent_before, connections * (time.perf_counter() - began_s)
    if sent < _LEAST_SENT * wanted:
        raise RuntimeError(f"the flood was none: it sent {sent} times of {wanted:.0f}")
    await processes.stop(name)
    return _p99(took)


async def _sent(ready_port: int) -> int:
    """Return how often a flood has sent."""
    reader, writer = await asyncio.open_connection("127.0.0.1", ready_port)
    told = await reader.read()
    writer.close()
    return int(told)


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
