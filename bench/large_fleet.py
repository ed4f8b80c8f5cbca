"""A relay with thousands of mock nodes, in three groups, on a broker of its own.

Keys and certificates are made once and kept below ``bench/out``; all else is new in each run. One group is
small, and called; another is stopped and goes on, so that all its nodes reconnect at once.
"""

import asyncio
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

from bench.cpu_time import cpu_s
from bench.kept_identities import kept_identities
from bench.metrics_page import metrics_client
from relay.cli.demo.local_system import Plan, issue_token, relay_command, start_broker
from relay.cli.demo.processes import ClaimedPorts, Processes
from relay.settings.config import StateFiles
from schemas.error_roots import OperatorError
from schemas.process.resources import raise_open_files_limit

CALLED = "called"
"""The group whose nodes are called."""

_OUT = Path(__file__).parent / "out"
HEARTBEAT_S = 100
"""How far heartbeats are apart: longer than the nodes take to start."""
_TTL_MS = 15 * 60_000
_POLL_S = 0.1
_RESERVED = 200


@dataclass(frozen=True, slots=True)
class LargeFleet:
    """A relay whose nodes are started by group.

    Attributes:
        groups: how many nodes each group has.
    """

    plan: Plan
    processes: Processes
    groups: Mapping[str, int]
    token: str

    @classmethod
    async def started(cls, groups: Mapping[str, int], processes: Processes) -> "LargeFleet":
        """Start broker and relay, and no node yet.

        Raises:
            StartError: a process could not be started.
        """
        plan = await asyncio.to_thread(_prepared, groups, processes.ports)
        await start_broker(plan, processes)
        fleet = cls(plan, processes, groups, issue_token(plan, "bench-agent"))
        await fleet.start_relay(plan.broker_port)
        return fleet

    @property
    def nodes(self) -> int:
        """How many nodes all groups have."""
        return sum(self.groups.values())

    @property
    def relay(self) -> psutil.Process:
        """The relay's process."""
        return psutil.Process(self.processes.pid("relay"))

    def ids(self, group: str) -> list[str]:
        """Return the ids of the nodes of a group."""
        return sorted(path.name for path in self._mocks(group).iterdir())

    async def start_relay(self, broker_port: int) -> None:
        """Start the relay, which subscribes to the broker at ``broker_port``."""
        command = relay_command(self.plan)
        command[command.index("--broker") + 1] = f"127.0.0.1:{broker_port}"
        command[command.index("relay")] = "bench.quiet_relay"
        await self.processes.start("relay", command)
        await self.processes.until_listening(self.plan.relay_port)

    async def start_nodes(self, group: str) -> None:
        """Start the nodes of ``group``, which send a heartbeat every ``HEARTBEAT_S``."""
        command = [
            *(sys.executable, "-P", "-m", "kubelet", "fleet"),
            *("--identities", str(self._mocks(group)), "--heartbeat", f"{HEARTBEAT_S}s"),
            *("--ttl", f"{_TTL_MS}ms", "--broker", self.plan.broker, "--relay", self.plan.public_url),
        ]
        await self.processes.start(group, command)

    async def value(self, metric: str) -> float:
        """Return the sum of those lines of the relay's metrics that begin with ``metric``."""
        async with metrics_client(self.plan.metrics) as http:
            lines = (await http.get("/metrics")).text.splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(metric))

    async def until(self, metric: str, enough: Callable[[float], bool], every_s: float = _POLL_S) -> float:
        """Wait until the ``value`` of a metric is enough; return that moment."""
        while not enough(await self.value(metric)):
            self.processes.check()
            await asyncio.sleep(every_s)
        return time.time()

    async def until_connected(self, enough: Callable[[float], bool]) -> float:
        """Wait until enough nodes are connected; return that moment."""
        return await self.until("edge_relay_nodes_connected ", enough, 0.5)

    def cpu_s(self) -> float:
        """Return how much CPU time the relay has used."""
        return cpu_s(self.processes.pid("relay"))

    def _mocks(self, group: str) -> Path:
        return self.plan.directory / "mocks" / group


def _prepared(groups: Mapping[str, int], ports: ClaimedPorts) -> Plan:
    """Return the plan of a run, with the identities of all groups, which are made if they are not there."""
    need = sum(groups.values()) + _RESERVED
    if (limit := raise_open_files_limit()) < need:
        raise OperatorError(f"{need} open files are needed, and {limit} are allowed: raise `ulimit -Hn`")
    directory = _OUT / "fleet"
    kept_identities(directory, groups)
    return Plan(directory, StateFiles(directory / "relay"), ports.take(), ports.take(), ports.take())
