"""The demo's system, as a benchmark measures it: in a directory of its own, until the block ends.

Must not measure.
"""

import asyncio
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from relay.cli.demo.local_system import LocalSystem, Plan, start_system
from relay.cli.demo.processes import Processes

_READY_TIMEOUT_S = 180


@asynccontextmanager
async def demo_system(nodes: int, kinds: tuple[str, ...] = ()) -> AsyncIterator[LocalSystem]:
    """Hold a system with ``nodes`` mock nodes beside its own, which has ``kinds``, once all are listed.

    Raises:
        StartError: a process could not be started, or has ended.
        TimeoutError: it was not ready in time.
    """
    with tempfile.TemporaryDirectory(prefix="edge-kubelet-bench-") as name:
        async with Processes.running(Path(name)) as processes:
            async with asyncio.timeout(_READY_TIMEOUT_S):
                plan = Plan.below(Path(name), processes.ports, kinds)
                system = await start_system(plan, nodes, processes, lambda _text: None)
                await system.until_listed()
            yield system
