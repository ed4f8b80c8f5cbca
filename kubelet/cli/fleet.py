"""``kubelet fleet``: mock nodes in as many processes as the limit of open files requires, as one command.

Their keys, signatures and sessions are real; their metrics are made up. Each process runs a part of the fleet
and reports its counts; with several, the first process runs none itself, but starts the others, adds up what
they report, and stops them. Must not be used where its nodes could be mistaken for boards.
"""

import asyncio
import logging
import os
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, TextIO

import structlog

from kubelet.config import NodeConfig
from kubelet.daemon.composition import node_environment
from kubelet.daemon.node import Node, NodeEnvironment
from kubelet.handlers.base import BuiltInHandler, HandlerFactory
from kubelet.handlers.system_echo import EchoHandler
from kubelet.session.link import LinkState
from schemas.error_roots import OperatorError
from schemas.identity_files import IdentityFiles, IdentityFilesError, NodeIdentity
from schemas.manifest import fingerprint
from schemas.process.logs import open_log
from schemas.process.resources import raise_open_files_limit
from schemas.times import duration_text

_GIB = 1024**3
_DISK = {"total_bytes": 32 * _GIB, "available_bytes": 20 * _GIB}
_START_SPREAD_S = 0.005
"""Between two nodes that start: a relay sends those away that exceed its rate."""
_MAX_CONNECTING = 64
"""Of those that start: on a slow machine the connections of more would all time out in the relay's queue."""
_CONNECT_S = 10.0
"""After that the next ones start all the same: the relay is away, or has given a retry time."""
_RESERVED = 64
"""Descriptors of a process that are not connections of its nodes."""
_REPORT_S = 1.0
_STOP_TIMEOUT_S = 20


class Counts(NamedTuple):
    """How many nodes are connected, how many of them announced, and how many the relay rejects."""

    connected: int
    announced: int
    rejected: int


class MadeUpMetrics(BuiltInHandler):
    """``system.metrics`` of a machine that does not exist, and that runs since its first sample."""

    @cached_property
    def started_ms(self) -> int:
        return self.now_ms()

    async def invoke(self, verb: str, arguments: Mapping[str, Any]) -> dict[str, Any]:  # noqa: ARG002 - both verbs
        started_ms, now = self.started_ms, self.now_ms()
        parts: dict[str, Any] = {
            "cpu": {"cores": 4, "usage_pct": 12.5},
            "mem": {"total_bytes": 4 * _GIB, "available_bytes": 3 * _GIB, "used_bytes": _GIB},
            "load": {"one": 0.5, "five": 0.4, "fifteen": 0.3},
            "disk": [{"mount": "/", "fs_type": "ext4", **_DISK}],
        }
        wanted = arguments.get("include", parts)
        return {
            "ts_ms": now,
            "node_id": self.node_id,
            "uptime_s": max(0, (now - started_ms) // 1000),
            **{name: part for name, part in parts.items() if name in wanted},
        }


_HANDLERS: Mapping[str, HandlerFactory] = MappingProxyType(
    {"system.echo": EchoHandler, "system.metrics": MadeUpMetrics}
)


def read_identities(directory: Path) -> list[NodeIdentity]:
    """Return the identities in the directories below ``directory``, in the order of their names.

    Raises:
        IdentityFilesError: there is none, or one is damaged.
    """
    if not directory.is_dir():
        raise IdentityFilesError(f"{directory} is not a directory: run `relay ca issue --mock N --out DIR`")
    identities = [IdentityFiles(path).read() for path in sorted(directory.iterdir()) if path.is_dir()]
    if not identities:
        raise IdentityFilesError(f"{directory} holds no identity: run `relay ca issue --mock N --out DIR`")
    return identities


class MockFleet:
    """One mock node for each identity."""

    def __init__(self, identities: Sequence[NodeIdentity], environment: NodeEnvironment) -> None:
        self._environment = environment
        self._nodes = [
            Node(
                identity,
                [
                    handler(kind.capability, identity.node_id, environment.now_ms, environment.log)
                    for name, handler in _HANDLERS.items()
                    if (kind := environment.kinds.get(name)) is not None and kind.capability is not None
                ],
                fingerprint({"machine_id": identity.node_id}),
                environment,
                last_issued=None,
            )
            for identity in identities
        ]

    def counts(self) -> Counts:
        states = Counter(node.link.state for node in self._nodes)
        announced = states[LinkState.ANNOUNCED]
        connected = announced + states[LinkState.OPEN]
        return Counts(connected, announced, len(self._nodes) - connected - states[LinkState.CONNECTING])

    async def run(self) -> None:
        self._environment.publisher.start()
        time, connecting = asyncio.get_running_loop().time, deque[tuple[float, Node]]()
        try:
            async with asyncio.TaskGroup() as tasks:
                for node in self._nodes:
                    tasks.create_task(node.run())
                    connecting.append((time() + _CONNECT_S, node))
                    # Thousands that start in one moment would all sign in one moment, at every heartbeat.
                    await asyncio.sleep(_START_SPREAD_S)
                    while len(connecting) >= _MAX_CONNECTING:
                        end, first = connecting[0]
                        if first.link.state is LinkState.CONNECTING and time() < end:
                            await asyncio.sleep(_START_SPREAD_S)
                        else:
                            connecting.popleft()
        finally:
            await self._environment.publisher.stop()


_HEADINGS = ("seconds", *Counts._fields)


async def run_all(identities: Path, config: NodeConfig) -> None:
    """Run a mock node for each of ``identities`` until cancelled, and print how many are connected.

    Raises:
        IdentityFilesError: there is no identity, or one is damaged.
        OperatorError: the limit of open files is too low, or a process of the fleet has ended.
    """
    nodes = read_identities(identities)
    processes = processes_for(len(nodes), raise_open_files_limit())
    progress = Progress(sys.stdout)
    progress.begin(len(nodes), processes)
    if processes == 1:
        await _run_nodes(nodes, identities, config, progress.show)
    else:
        commands = [_part_command(identities, config, f"{part}/{processes}") for part in range(processes)]
        await Parts(commands, progress.show).run()


async def run_part(identities: Path, config: NodeConfig, part: str) -> None:
    """Run part ``part``, as "0/2", of a fleet of several processes, and report to the one that started it.

    Raises:
        OSError: that process has ended.
    """
    number, _, parts = part.partition("/")
    raise_open_files_limit()
    await _run_nodes(read_identities(identities)[int(number) :: int(parts)], identities, config, print_counts)


async def _run_nodes(
    nodes: Sequence[NodeIdentity], identities: Path, config: NodeConfig, show: Callable[[Counts], None]
) -> None:
    with open_log("kubelet", sys.stderr) as (log, _lines):
        # What goes well is in the counts: thousands of lines would hide what does not.
        quiet = structlog.wrap_logger(
            log, processors=[], wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING)
        )
        files, client_id = IdentityFiles(identities), f"edge-fleet-{os.getpid()}"
        environment = node_environment(config, client_id, quiet, files, nodes=len(nodes))
        fleet = MockFleet(nodes, environment)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(fleet.run())
            tasks.create_task(report(fleet.counts, show))


def _part_command(identities: Path, config: NodeConfig, part: str) -> list[str]:
    options = {
        "--identities": str(identities),
        "--broker": str(config.broker),
        "--relay": ",".join(config.relays),
        "--heartbeat": duration_text(int(config.heartbeat_s * 1000)),
        "--ttl": duration_text(config.ttl_ms),
        "--part": part,
    }
    return [sys.executable, "-P", "-m", "kubelet", "fleet", *chain.from_iterable(options.items())]


def processes_for(nodes: int, descriptors: int) -> int:
    """Return how many processes hold ``nodes`` connections, each with at most ``descriptors`` open files.

    Raises:
        OperatorError: not even one node fits.
    """
    fit = descriptors - _RESERVED
    if fit <= 0:
        raise OperatorError(f"a limit of {descriptors} open files is too low: raise it with `ulimit -n`")
    return -(-nodes // fit)


class Progress:
    """Prints the counts of the whole fleet as rows of a table, when they have changed."""

    def __init__(self, stream: TextIO, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._stream = stream
        self._monotonic = monotonic
        self._started = monotonic()
        self._shown: Counts | None = None

    def begin(self, nodes: int, processes: int) -> None:
        several = "process" if processes == 1 else "processes"
        self._print(f"{nodes:,} mock nodes in {processes} {several}; Ctrl-C stops them")
        self._print("  ".join(f"{heading:>9}" for heading in _HEADINGS))

    def show(self, counts: Counts) -> None:
        if counts == self._shown:
            return
        self._shown = counts
        seconds = f"{self._monotonic() - self._started:.1f}"
        self._print("  ".join([f"{seconds:>9}", *(f"{count:>9,}" for count in counts)]))

    def _print(self, line: str) -> None:
        print(line, file=self._stream, flush=True)


async def report(counts: Callable[[], Counts], to: Callable[[Counts], None]) -> None:
    """Give ``to`` the counts once a second until cancelled."""
    while True:
        to(counts())
        await asyncio.sleep(_REPORT_S)


def print_counts(counts: Counts) -> None:
    """Report to the process that has started this one.

    Raises:
        OSError: it has ended, so that this process must end too.
    """
    print(*counts, flush=True)  # noqa: T201 - read by ``Parts``


class Parts:
    """The processes of a fleet of several; ``show`` is called with the sums of their counts."""

    def __init__(self, commands: Sequence[Sequence[str]], show: Callable[[Counts], None]) -> None:
        self._commands = commands
        self._show = show
        self._counts = [Counts(0, 0, 0)] * len(commands)

    async def run(self) -> None:
        """Run them until cancelled, and stop them all.

        Raises:
            OperatorError: one has ended by itself; it has printed why.
        """
        processes: list[asyncio.subprocess.Process] = []
        try:
            async with asyncio.TaskGroup() as tasks:
                for part, command in enumerate(self._commands):
                    process = await asyncio.create_subprocess_exec(
                        # A session of its own: Ctrl-C reaches this process alone, which stops the others.
                        *command, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE,
                        start_new_session=True,
                    )  # fmt: skip
                    processes.append(process)
                    tasks.create_task(self._follow(part, process))
                tasks.create_task(report(self._sum, self._show))
        finally:
            await asyncio.gather(*map(_stopped, processes))

    async def _follow(self, part: int, process: asyncio.subprocess.Process) -> None:
        if process.stdout is None:
            raise RuntimeError("the process has no standard output")
        async for line in process.stdout:
            self._counts[part] = Counts(*map(int, line.split()))
        raise OperatorError(f"a process of the fleet ended with exit code {await process.wait()}")

    def _sum(self) -> Counts:
        return Counts(*map(sum, zip(*self._counts, strict=True)))


async def _stopped(process: asyncio.subprocess.Process) -> None:
    with suppress(ProcessLookupError):
        process.terminate()
    try:
        async with asyncio.timeout(_STOP_TIMEOUT_S):
            # Its output must be read to the end: it would block on a full pipe.
            await process.communicate()
    except TimeoutError:
        process.kill()
        await process.wait()
