"""What a call of a node costs that another relay holds, beside one of a node of the relay that is called.

Two relays and the server that joins them, each a process of its own, with mock nodes behind both; one agent
calls the first relay, and the two kinds of nodes take turns. The CPU time of a call is that of all processes
but the agent's, and is told for each of them. Then the fleet is sealed, and all of that is measured: what it
was before is told beside it.
"""

import asyncio
import os
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil

from bench.load import Target, latencies_ms, tool_call
from bench.results import Figure
from relay.cli.demo.local_system import (
    SERVER,
    TENANT,
    LocalSystem,
    Plan,
    fleet_command,
    start_cluster_server,
    start_more_relays,
    start_system,
)
from relay.cli.demo.processes import Processes
from relay.pki.authority import CertificateAuthority
from relay.settings.environment import now_ms
from relay.state.seal import FleetSeal
from schemas.process.status_socket import read_status

NODES = 100

_ROUNDS = 6
_CALLS = 200
# Far below the ten calls a second that each mock node announces: its rate must never be what is measured.
_PAUSE_S = 0.002
_READY_TIMEOUT_S = 120
_POLL_S = 0.1
_FLEET = "nodes of the second relay"
_REFERENCE = "a node of the relay that is called"


async def measure_cross_relay() -> list[Figure]:
    """Return ``cross_relay_call_p50…``, ``cross_relay_cpu_us_…`` and ``cross_relay_offline_p50``."""
    with tempfile.TemporaryDirectory(prefix="edge-kubelet-bench-") as name:
        directory = Path(name)
        async with Processes.running(directory) as processes:
            async with asyncio.timeout(_READY_TIMEOUT_S):
                plan = await start_cluster_server(Plan.below(directory, processes.ports), processes)
                system = await start_system(plan, NODES, processes, lambda _text: None)
                (second,) = await start_more_relays(plan, 1, processes, lambda _text: None)
                far = await _start_nodes(plan, second.plan, processes)
                await replace(system, mock_nodes=[*system.mock_nodes, *far]).until_listed()
            own, cross = _target(system, system.mock_nodes), _target(system, far)
            measured = {
                "asking_relay": ["relay"],
                "owning_relay": [second.relay],
                "server": [SERVER],
                "nodes": ["fleet", _FLEET],
            }
            parts = {
                part: [psutil.Process(processes.pid(name)) for name in each]
                for part, each in measured.items()
            }
            before, _ = await _alternated([own, cross], parts)
            ca = CertificateAuthority(plan.state.ca, now_ms, os.urandom)
            FleetSeal(plan.state.cluster_seal, ca).seal(now_ms())
            async with asyncio.timeout(_READY_TIMEOUT_S):
                await _until_sealed(plan, second.plan)
                await replace(system, mock_nodes=[*system.mock_nodes, *far]).until_listed()
            took, cpu_us = await _alternated([own, cross], parts)
            await processes.stop(_FLEET)
            offline = statistics.median(await latencies_ms(cross, _CALLS, expected=b"E_NODE_OFFLINE"))
    p50s = [statistics.median(each) for each in took]
    plain = [statistics.median(each) for each in before]
    of_own, of_cross = (sum(each.values()) for each in cpu_us)
    return [
        Figure("cross_relay_call_p50", p50s[1], "ms", _REFERENCE, p50s[0], "ratio <= 1.5"),
        Figure("cross_relay_call_p50_not_sealed", plain[1], "ms", _REFERENCE, plain[0], "reported"),
        Figure("cross_relay_cpu_us_per_call", of_cross, "us", _REFERENCE, of_own, "reported"),
        *(
            Figure(f"cross_relay_cpu_us_{part}", used_us, "us", "all processes", of_cross, "reported")
            for part, used_us in cpu_us[1].items()
        ),
        Figure("cross_relay_offline_p50", offline, "ms", _REFERENCE, p50s[0], "<= 5 ms"),
    ]


async def _until_sealed(*plans: Plan) -> None:
    """Return when the relays of ``plans`` are sealed, and connected."""
    for plan in plans:
        while not _is_sealed(await asyncio.to_thread(read_status, plan.state.root)):  # noqa: ASYNC110 - it tells no change
            await asyncio.sleep(_POLL_S)


def _is_sealed(status: Mapping[str, Any]) -> bool:
    cluster = status.get("cluster", {})
    return bool(cluster.get("sealed") and cluster["others"] and status["subsystems"]["cluster"]["ready"])


async def _start_nodes(first: Plan, second: Plan, processes: Processes) -> list[str]:
    """Start mock nodes behind the second relay, and return their ids."""
    plan = replace(second, directory=second.directory / "more")
    ca = CertificateAuthority(first.state.ca, now_ms, os.urandom)
    plan.directory.mkdir()
    nodes = ca.issue_mock(NODES, plan.mocks, TENANT)
    await processes.start(_FLEET, fleet_command(plan))
    return nodes


def _target(system: LocalSystem, nodes: Sequence[str]) -> Target:
    port = system.plan.relay_port
    return Target(port, [tool_call(port, f"sysecho.{node}.echo.invoke", system.token) for node in nodes])


async def _alternated(
    targets: Sequence[Target], processes: Mapping[str, Sequence[psutil.Process]]
) -> tuple[list[list[float]], list[dict[str, float]]]:
    """Return how long the calls of each target took in ms, and the CPU time of one in each part in us."""
    took: list[list[float]] = [[] for _ in targets]
    used_s = [dict.fromkeys(processes, 0.0) for _ in targets]
    for target in targets:
        await latencies_ms(target, _CALLS, _PAUSE_S)
    for _ in range(_ROUNDS):
        for number, target in enumerate(targets):
            before = {part: _cpu_s(each) for part, each in processes.items()}
            took[number].extend(await latencies_ms(target, _CALLS, _PAUSE_S))
            for part, each in processes.items():
                used_s[number][part] += _cpu_s(each) - before[part]
    count = _ROUNDS * _CALLS
    return took, [{part: used / count * 1e6 for part, used in each.items()} for each in used_s]


def _cpu_s(processes: Sequence[psutil.Process]) -> float:
    times = [process.cpu_times() for process in processes]
    return float(sum(each.user + each.system for each in times))
