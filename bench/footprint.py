"""What a node costs its board: memory, CPU at rest, and the time until it is announced.

Beside Debian's node_exporter, which does less and is what boards usually run. Must not be used on a machine
that does other work: what it measures is small.
"""

import asyncio
import os
import shutil
import time
from collections.abc import Awaitable, Callable

import paho.mqtt.client as paho
import psutil
from paho.mqtt.enums import CallbackAPIVersion

from bench.demo_system import demo_system
from bench.results import Figure
from relay.cli.demo.local_system import Plan, kubelet_command
from relay.cli.demo.processes import Processes
from schemas import topics
from schemas.addresses import parse_host_port

EXPORTER = "prometheus-node-exporter"

_SETTLE_S = 5.0
_REST_S = 65.0
_STARTS = 3


async def measure_footprint() -> list[Figure]:
    """Return ``kubelet_rss_mib``, ``kubelet_cpu_pct`` and ``kubelet_start_to_announce_s``."""
    exporter = shutil.which(EXPORTER)
    if exporter is None:
        print(f"left out: the node's footprint needs its reference: apt-get install {EXPORTER}")
        return []
    # As a node is installed: with its modules compiled. Compiling them at each start takes memory and time.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    async with demo_system(0) as system:
        plan, processes = system.plan, system.processes
        await processes.kill("kubelet")
        port = processes.ports.take()
        command = [exporter, f"--web.listen-address=127.0.0.1:{port}"]
        announced = _Announcement(plan, system.real_node)
        await announced.listen()
        ours, theirs = [], []
        for _ in range(_STARTS):
            ours.append(await _start(processes, "kubelet", kubelet_command(plan), announced.wait))
            theirs.append(
                await _start(processes, "exporter", command, lambda: processes.until_listening(port))
            )
            await processes.kill("kubelet")
            await processes.kill("exporter")
        await _start(processes, "kubelet", kubelet_command(plan), announced.wait)
        await _start(processes, "exporter", command, lambda: processes.until_listening(port))
        await announced.close()
        at_rest = await _at_rest([processes.pid("kubelet"), processes.pid("exporter")])
        return [*at_rest, _figure("kubelet_start_to_announce_s", min(ours), "s", min(theirs), "<= 0.5")]


async def _at_rest(pids: list[int]) -> list[Figure]:
    kubelet, exporter = (psutil.Process(pid) for pid in pids)
    await asyncio.sleep(_SETTLE_S)
    before = [_cpu_s(process) for process in (kubelet, exporter)]
    await asyncio.sleep(_REST_S)
    used = [
        100 * (_cpu_s(process) - earlier) / _REST_S
        for process, earlier in zip((kubelet, exporter), before, strict=True)
    ]
    resident = [process.memory_info().rss / 2**20 for process in (kubelet, exporter)]
    # An exporter without requests may use nothing at all; the divisor of a ratio must not be 0.
    return [
        _figure("kubelet_rss_mib", resident[0], "MiB", resident[1], "<= 38"),
        _figure("kubelet_cpu_pct", used[0], "%", max(used[1], 0.01), "<= 0.5"),
    ]


def _figure(name: str, value: float, unit: str, reference_value: float, wanted: str) -> Figure:
    return Figure(name, value, unit, f"Debian's {EXPORTER}", reference_value, wanted)


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


async def _start(
    processes: Processes, name: str, command: list[str], ready: Callable[[], Awaitable[None]]
) -> float:
    started = time.perf_counter()
    await processes.start(name, command)
    await ready()
    return time.perf_counter() - started


class _Announcement:
    """Waits for the next announce of one node on the broker."""

    def __init__(self, plan: Plan, node_id: str) -> None:
        self._address = parse_host_port(plan.broker)
        self._topic = topics.announce(node_id)
        self._arrived = asyncio.Event()
        self._client = paho.Client(CallbackAPIVersion.VERSION2)

    async def listen(self) -> None:
        """Subscribe, and pass over what is retained."""
        loop = asyncio.get_running_loop()

        def on_message(_client: object, _data: object, message: paho.MQTTMessage) -> None:
            if not message.retain:
                loop.call_soon_threadsafe(self._arrived.set)

        self._client.on_message = on_message
        await asyncio.to_thread(self._client.connect, self._address.host, self._address.port)
        self._client.subscribe(self._topic, 1)
        self._client.loop_start()

    async def wait(self) -> None:
        """Wait for the next announce."""
        self._arrived.clear()
        await self._arrived.wait()

    async def close(self) -> None:
        """Disconnect from the broker."""
        self._client.disconnect()
        await asyncio.to_thread(self._client.loop_stop)
