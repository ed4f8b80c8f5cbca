"""Five relays that NATS joins, and mock nodes that are added in groups and choose among the relays.

Keys and certificates are made once and kept below ``bench/out``; all else is new in each run. Must not judge.
"""

import asyncio
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from bench.cpu_time import cpu_s
from bench.kept_identities import kept_identities, make_new
from bench.metrics_page import metrics_client
from relay.cli.demo.local_system import (
    SERVER,
    Plan,
    issue_token,
    relay_command,
    start_broker,
    start_cluster_server,
)
from relay.cli.demo.processes import Processes
from relay.settings.config import StateFiles
from schemas.error_roots import OperatorError
from schemas.files import make_private_directory
from schemas.process.resources import raise_open_files_limit

RELAYS = 5
HEARTBEAT_S = 300
"""How far heartbeats are apart: every relay verifies each of them."""

_OUT = Path(__file__).parent / "out" / "scale"
_TTL_MS = 30 * 60_000
_RESERVED = 300
_CONNECT_POLL_S = 1.0
"""Each look reads the metrics of all relays, which takes time of theirs."""
_ACCEPT_POLL_S = 0.25


@dataclass(frozen=True, slots=True)
class ScaleFleet:
    """The relays, by their names, and the nodes that are started by group.

    Attributes:
        plans: where each relay is.
        groups: how many nodes each group has.
        token: an agent's, for any of the relays.
    """

    plans: Mapping[str, Plan]
    processes: Processes
    groups: Mapping[str, int]
    token: str

    @classmethod
    async def started(cls, groups: Mapping[str, int], processes: Processes) -> "ScaleFleet":
        """Start the broker, the server and the relays, and no node yet.

        Raises:
            StartError: a process could not be started.
            OperatorError: this machine allows too few open files.
        """
        need = sum(groups.values()) // RELAYS * 3 // 2 + _RESERVED
        if (limit := raise_open_files_limit()) < need:
            raise OperatorError(f"{need} open files are needed, and {limit} are allowed: raise `ulimit -Hn`")
        first = await asyncio.to_thread(_prepared, groups, processes)
        await start_broker(first, processes)
        first = await start_cluster_server(first, processes)
        token = issue_token(first, "bench-agent")
        plans = {"relay-1": first}
        plans |= {f"relay-{number}": _like(first, number, processes) for number in range(2, RELAYS + 1)}
        fleet = cls(plans, processes, groups, token)
        for name in plans:
            await fleet.start_relay(name, plans[name])
        return fleet

    @property
    def first(self) -> Plan:
        """Where the first relay is, and the CA."""
        return self.plans["relay-1"]

    def ids(self, group: str) -> list[str]:
        """Return the ids of the nodes of a group."""
        return sorted(path.name for path in self._mocks(group).iterdir())

    async def start_relay(self, name: str, plan: Plan) -> None:
        """Start a relay of the fleet, and return when it listens."""
        command = relay_command(plan)
        command[command.index("relay")] = "bench.quiet_relay"
        await self.processes.start(name, command)
        await self.processes.until_listening(plan.relay_port)

    def another(self) -> Plan:
        """Return the plan of one more relay, without nodes of its own."""
        return _like(self.first, len(self.plans) + 1, self.processes)

    async def start_nodes(self, group: str) -> None:
        """Start the nodes of ``group``, which know every relay, and heartbeat every ``HEARTBEAT_S``."""
        command = [
            *(sys.executable, "-P", "-m", "kubelet", "fleet"),
            *("--identities", str(self._mocks(group)), "--heartbeat", f"{HEARTBEAT_S}s"),
            *("--ttl", f"{_TTL_MS}ms", "--broker", self.first.broker),
            *("--relay", ",".join(self._relays)),
        ]
        await self.processes.start(group, command)

    async def value(self, plan: Plan, metric: str) -> float:
        """Return the sum of those lines of a relay's metrics that begin with ``metric``."""
        async with metrics_client(plan.metrics) as http:
            lines = (await http.get("/metrics")).text.splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(metric))

    async def until_connected(self, count: int) -> None:
        """Wait until ``count`` nodes are connected, to whichever relays."""
        while await self._connected() < count:
            self.processes.check()
            await asyncio.sleep(_CONNECT_POLL_S)

    async def until_accepted(self, plan: Plan, count: int) -> float:
        """Wait until a relay has accepted manifests of ``count`` nodes; return that moment."""
        while await self.value(plan, 'edge_relay_manifests_total{outcome="accepted"') < count:
            self.processes.check()
            await asyncio.sleep(_ACCEPT_POLL_S)
        return time.time()

    def cpu_s(self, names: Sequence[str]) -> float:
        """Return how much CPU time processes have used."""
        return sum(cpu_s(self.processes.pid(name)) for name in names)

    async def _connected(self) -> float:
        counts = [await self.value(plan, "edge_relay_nodes_connected ") for plan in self.plans.values()]
        return sum(counts)

    @property
    def _relays(self) -> list[str]:
        return [self.first.public_url, *(plan.url for plan in self.plans.values())]

    def _mocks(self, group: str) -> Path:
        return _OUT / "mocks" / group


SERVERS = (SERVER, "broker")
"""The processes of the nats-server that joins the relays, and of the MQTT broker."""


def _prepared(groups: Mapping[str, int], processes: Processes) -> Plan:
    """Return the plan of the first relay, whose CA has issued the identities of all groups."""
    kept_identities(_OUT, groups)
    ports = processes.ports
    return Plan(_OUT, StateFiles(_OUT / "relay"), ports.take(), ports.take(), ports.take())


def _like(first: Plan, number: int, processes: Processes) -> Plan:
    """Return the plan of a further relay: with the CA's public side."""
    directory = first.directory / f"relay-{number}"
    make_new(directory)
    state = StateFiles(directory / "relay")
    make_private_directory(state.root)
    shutil.copytree(first.state.ca, state.ca, ignore=shutil.ignore_patterns("*.key"))
    return replace(first, directory=directory, state=state, relay_port=processes.ports.take())
