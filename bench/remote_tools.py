"""What the checks of remote tools cost: CPU time of a call beside that of the bare SDK client.

Both call the same server, which is a process of its own, in alternation and one call at a time. Each guarded
call passes every check and leaves its two records in a file.
"""

import asyncio
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from mcp.client.client import Client

from bench.bare_server import TOOL
from bench.results import Figure
from relay.cli.demo.processes import Processes
from relay.remote_tools import Permissions, RemoteTools, Risk

_ROUNDS = 61
_CALLS = 25
_ARGUMENTS = {"message": "x" * 64}
_READY_TIMEOUT_S = 60

Call = Callable[[], Awaitable[object]]


async def measure_remote_tools() -> Figure:
    """Return ``remote_tools_overhead``."""
    with tempfile.TemporaryDirectory(prefix="edge-kubelet-bench-") as name:
        directory = Path(name)
        async with Processes.running(directory) as processes:
            port = processes.ports.take(8690)
            await processes.start("bare", [sys.executable, "-P", "-m", "bench.bare_server", str(port)])
            async with asyncio.timeout(_READY_TIMEOUT_S):
                await processes.until_listening(port)
            ours, bare = await _alternated(f"http://127.0.0.1:{port}/mcp", directory)
    return Figure(
        name="remote_tools_overhead",
        value=statistics.median(ours),
        unit="us of CPU",
        reference="bare SDK client",
        reference_value=statistics.median(bare),
        wanted="ratio <= 1.15",
    )


async def _alternated(url: str, directory: Path) -> tuple[list[float], list[float]]:
    permissions = Permissions(allow=(TOOL,), max_risk=Risk.ADMIN)
    audit, pins = directory / "calls.jsonl", directory / "pins.json"
    async with (
        RemoteTools(url, permissions=permissions, audit=audit, pins=pins) as tools,
        Client(url) as client,
    ):
        # As an agent runtime does it first; the SDK's client would do it within its first call.
        await tools.list_tools()
        await client.list_tools()

        async def guarded() -> object:
            return await tools.execute(TOOL, _ARGUMENTS)

        async def plain() -> object:
            return await client.call_tool(TOOL, _ARGUMENTS)

        ours, bare = [], []
        for _ in range(_ROUNDS):
            ours.append(await _cpu_us(guarded))
            bare.append(await _cpu_us(plain))
    return ours[1:], bare[1:]


async def _cpu_us(call: Call) -> float:
    """Return the microseconds of this process's CPU time that one call takes."""
    before = time.process_time()
    for _ in range(_CALLS):
        await call()
    return (time.process_time() - before) / _CALLS * 1e6
