"""How long a relay takes until it serves that knows ten thousand nodes, beside one that knows none.

Each node has a leaf in the CA's ledger, a mark, a verification that was kept, and a label. No node is
connected, and the broker retains nothing: from then on it takes the time of an inventory, a figure of
``fleet_10k``, until the relay is ready. ``BENCH_NODES`` is the number of nodes for a short trial.
"""

import asyncio
import os
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import httpx2

from bench.results import Figure
from relay.cli.demo.local_system import TENANT, Plan, relay_command, start_broker
from relay.cli.demo.processes import Processes
from relay.fleet.replay_marks import KeptLeaf, MarkStore
from relay.pki.authority import CertificateAuthority
from relay.settings.environment import now_ms
from relay.state.names import NameLedger
from schemas.certificates import verify_leaf
from schemas.identity_files import IdentityFiles
from schemas.process.logs import make_logger
from schemas.trust import HighWaterMark

_NODES = int(os.environ.get("BENCH_NODES", "10000"))
_STARTS = 3
_POLL_S = 0.02
_TIMEOUT_S = 600


async def measure_relay_start() -> Figure:
    """Return ``relay_start_s``: from the start of the process until it answers, the fastest of three."""
    with tempfile.TemporaryDirectory(prefix="edge-kubelet-bench-") as name:
        async with Processes.running(Path(name)) as processes, asyncio.timeout(_TIMEOUT_S):
            plan = Plan.below(Path(name), processes.ports)
            await start_broker(plan, processes)
            CertificateAuthority(plan.state.ca, now_ms, os.urandom).create()
            without = await _fastest(plan, processes)
            await _make_known(plan, _NODES)
            known = await _fastest(plan, processes)
    return Figure("relay_start_s", known, "s", "a relay that knows no node", without, "<= 3")


async def _fastest(plan: Plan, processes: Processes) -> float:
    taken = []
    for _ in range(_STARTS):
        started = time.perf_counter()
        await processes.start("relay", relay_command(plan))
        await _until_it_answers(plan, processes)
        taken.append(time.perf_counter() - started)
        await processes.stop("relay")
    return min(taken)


async def _until_it_answers(plan: Plan, processes: Processes) -> None:
    async with httpx2.AsyncClient(base_url=plan.public_url, trust_env=False) as http:
        while True:
            processes.check()
            with suppress(httpx2.TransportError):
                await http.get("/readyz")
                return
            await asyncio.sleep(_POLL_S)


async def _make_known(plan: Plan, count: int) -> None:
    """Write what a relay keeps of ``count`` nodes that it has enrolled, verified and named."""
    ca = CertificateAuthority(plan.state.ca, now_ms, os.urandom)
    nodes = await asyncio.to_thread(ca.issue_mock, count, plan.mocks, TENANT)
    roots, names = ca.roots(), NameLedger(plan.state.node_names, now_ms)
    marks = MarkStore(plan.state.marks, make_logger("relay", sys.stderr))
    for number, node_id in enumerate(nodes):
        marks.put(node_id, TENANT, HighWaterMark(now_ms(), "0" * 64))
        leaf = verify_leaf(IdentityFiles(plan.mocks / node_id).leaf_pem(), roots, now_ms())
        marks.put_leaf(KeptLeaf.of(leaf))
        names.label(node_id, TENANT, f"board {number}")
    # It writes when it ends.
    writing = asyncio.create_task(marks.run())
    await asyncio.sleep(0)
    writing.cancel()
    await asyncio.gather(writing, return_exceptions=True)
