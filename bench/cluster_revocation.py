"""How long a node that is revoked at one relay of a fleet can still be called by way of the others.

Three relays and the server that joins them, each a process of its own, with mock nodes behind the first. Each
is revoked on the machine of the second, and called by way of the first and the third until both refuse it.
"""

import asyncio
import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from bench.load import tool_call, until_answered
from bench.results import Figure
from relay.cli.demo.local_system import Plan, start_cluster_server, start_more_relays, start_system
from relay.cli.demo.processes import Processes
from relay.pki.authority import CertificateAuthority
from relay.settings.environment import now_ms

_NODES = 50
_REVOKED = 20
_READY_TIMEOUT_S = 120
_REFERENCE_S = 1.0
_REFUSED = b"E_ATTESTATION_FAILED"


async def measure_cluster_revocation() -> Figure:
    """Return ``cluster_revocation_s``: the longest of those that were measured."""
    with tempfile.TemporaryDirectory(prefix="edge-kubelet-bench-") as name:
        async with Processes.running(Path(name)) as processes:
            async with asyncio.timeout(_READY_TIMEOUT_S):
                plan = await start_cluster_server(Plan.below(Path(name), processes.ports), processes)
                first = await start_system(plan, _NODES, processes, lambda _text: None)
                second, other = await start_more_relays(plan, 2, processes, lambda _text: None)
                await first.until_listed()
                ways = [(system.plan.relay_port, system.token) for system in (first, other)]
                for node_id in first.mock_nodes:
                    await _answered(ways, node_id, b'"ping"')
            ca = CertificateAuthority(second.plan.state.ca, now_ms, os.urandom)
            took = []
            for node_id in first.mock_nodes[:_REVOKED]:
                await asyncio.to_thread(ca.revoke, node_id)
                started = time.perf_counter()
                async with asyncio.timeout(_READY_TIMEOUT_S):
                    await _answered(ways, node_id, _REFUSED)
                took.append(time.perf_counter() - started)
    return Figure(
        name="cluster_revocation_s",
        value=max(took),
        unit="s",
        reference="the second that is promised",
        reference_value=_REFERENCE_S,
        wanted="<= 1 s",
    )


async def _answered(ways: Sequence[tuple[int, str]], node_id: str, text: bytes) -> None:
    """Call a node at each port with each token until every answer contains ``text``."""
    calls = [(port, tool_call(port, f"sysecho.{node_id}.echo.invoke", token)) for port, token in ways]
    await asyncio.gather(*(until_answered(port, call, text) for port, call in calls))
