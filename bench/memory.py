"""What a connected node costs the relay in memory, beside a bare server's idle connection."""

import asyncio
import os
import sys
import tempfile
from pathlib import Path

import httpx2
import psutil
from websockets.asyncio.client import ClientConnection, connect

from bench.metrics_page import metrics_client
from bench.results import Figure
from relay.cli.demo.local_system import TENANT, Plan, fleet_command, start_system
from relay.cli.demo.processes import Processes
from relay.pki.authority import CertificateAuthority
from relay.settings.environment import now_ms

_NODES = 5000
_READY_TIMEOUT_S = 300
_OPENING_AT_ONCE = 50
_POLL_S = 0.2


async def measure_memory() -> list[Figure]:
    """Return ``relay_one_node_mib`` and ``kib_per_connected_node``."""
    # As a relay is installed: with its modules compiled. Compiling them at each start takes memory.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    with tempfile.TemporaryDirectory(prefix="edge-kubelet-bench-") as name:
        directory = Path(name)
        async with Processes.running(directory) as processes, asyncio.timeout(_READY_TIMEOUT_S):
            reference = await _bare(processes)
            resident, value = await _relay(directory, processes)
    earlier = "the relay before it postponed what it does not use"
    return [
        Figure("relay_one_node_mib", resident, "MiB", earlier, 99.3, "<= 92"),
        Figure(
            name="kib_per_connected_node",
            value=value,
            unit="KiB",
            reference="bare websockets server, idle connection",
            reference_value=reference,
            wanted="ratio <= 2",
        ),
    ]


async def _relay(directory: Path, processes: Processes) -> tuple[float, float]:
    """Return the relay's MiB with one node, and the KiB of each further one."""
    plan = Plan.below(directory, processes.ports)
    # One node of its own first, so that what is loaded once is loaded before.
    system = await start_system(plan, 0, processes, lambda _text: None)
    await system.until_listed()
    ca = CertificateAuthority(plan.state.ca, now_ms, os.urandom)
    ca.issue_mock(_NODES, plan.mocks, TENANT)
    resident = psutil.Process(processes.pid("relay")).memory_info().rss / 2**20
    before = _private_kib(processes.pid("relay"))
    await processes.start("fleet", fleet_command(plan))
    async with metrics_client(plan.metrics) as http:
        while await _announced(http) < _NODES + 1:
            processes.check()
            await asyncio.sleep(_POLL_S)
    return resident, (_private_kib(processes.pid("relay")) - before) / _NODES


async def _announced(http: httpx2.AsyncClient) -> float:
    """Return how many nodes are connected, or how many manifests were accepted if that is less."""
    metrics = (await http.get("/metrics")).text.splitlines()
    connected = sum(_values(metrics, "edge_relay_nodes_connected "))
    accepted = sum(_values(metrics, 'edge_relay_manifests_total{outcome="accepted"'))
    return min(connected, accepted)


def _values(metrics: list[str], start: str) -> list[float]:
    return [float(line.rpartition(" ")[2]) for line in metrics if line.startswith(start)]


async def _bare(processes: Processes) -> float:
    port = processes.ports.take()
    await processes.start("bare", [sys.executable, "-P", "-m", "bench.bare_websockets", str(port)])
    await processes.until_listening(port)
    before = _private_kib(processes.pid("bare"))
    gate = asyncio.Semaphore(_OPENING_AT_ONCE)

    async def open_one() -> ClientConnection:
        async with gate:
            return await connect(f"ws://127.0.0.1:{port}", compression=None, ping_interval=None)

    connections = await asyncio.gather(*(open_one() for _ in range(_NODES)))
    per_connection = (_private_kib(processes.pid("bare")) - before) / _NODES
    await asyncio.gather(*(connection.close() for connection in connections))
    await processes.kill("bare")
    return per_connection


def _private_kib(pid: int) -> float:
    return float(psutil.Process(pid).memory_full_info().uss) / 1024
