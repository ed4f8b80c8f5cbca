"""What the relay spends on a thousand nodes that are sampled once a second, and fifty agents that listen."""

import asyncio
from collections.abc import Sequence

import psutil

from bench.demo_system import demo_system
from bench.load import call_once, listen, tool_call
from bench.results import Figure
from relay.cli.demo.local_system import LocalSystem, issue_token

_NODES = 1000
_AGENTS = 50
_INTERVAL_MS = 1000
_SECONDS = 10
_READY_TIMEOUT_S = 180
_UPDATED = b"notifications/resources/updated"


async def measure_telemetry_fanout() -> list[Figure]:
    """Return ``telemetry_fanout``."""
    async with demo_system(_NODES) as system:
        return [await _measured(system)]


async def _measured(system: LocalSystem) -> Figure:
    relay = psutil.Process(system.processes.pid("relay"))
    share = _NODES // _AGENTS
    listeners = [
        _Listener(system, f"bench-{number}", system.mock_nodes[number * share : (number + 1) * share])
        for number in range(_AGENTS)
    ]
    async with asyncio.TaskGroup() as tasks:
        listening = [tasks.create_task(listener.run()) for listener in listeners]
        async with asyncio.timeout(_READY_TIMEOUT_S):
            await asyncio.gather(*(listener.following.wait() for listener in listeners))
        before_cpu, before = _cpu_s(relay), sum(listener.updates for listener in listeners)
        await asyncio.sleep(_SECONDS)
        used = (_cpu_s(relay) - before_cpu) / _SECONDS
        updates = (sum(listener.updates for listener in listeners) - before) / _SECONDS
        for task in listening:
            task.cancel()
    return Figure(
        name="telemetry_fanout",
        value=used * 100,
        unit="% of a core",
        reference=f"updates a second from {_NODES} nodes to {_AGENTS} listeners",
        reference_value=updates,
        wanted="reported",
    )


class _Listener:
    """One agent that follows its share of the nodes.

    Attributes:
        following: set when each of its nodes has been subscribed.
        updates: how many notifications it has received.
    """

    def __init__(self, system: LocalSystem, sub: str, nodes: Sequence[str]) -> None:
        self._port = system.plan.relay_port
        self._token = issue_token(system.plan, sub)
        self._nodes = nodes
        self.following = asyncio.Event()
        self.updates = 0

    async def run(self) -> None:
        """Listen until cancelled."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        try:
            uris = [f"node://{node}/telemetry" for node in self._nodes]
            writer.write(listen(self._port, self._token, uris))
            await reader.readuntil(b"acknowledged")
            for node in self._nodes:
                tool = f"sys.{node}.sysmetrics.subscribe"
                request = tool_call(self._port, tool, self._token, {"interval_ms": _INTERVAL_MS})
                answer = await call_once(self._port, request)
                if b'"isError":false' not in answer:
                    raise RuntimeError(f"what is measured must succeed: {answer[:200]!r}")
            self.following.set()
            async for line in reader:
                self.updates += _UPDATED in line
        finally:
            writer.close()


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system
