"""``kubelet fleet``: mock nodes in as many processes as the limit of open files requires, as one command.

Each process runs a part of the fleet and reports its counts; with several, the first process runs none
itself, but starts the others, adds up what they report, and stops them. Must not know what a mock node does.
"""

import asyncio
import logging
import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TextIO

import structlog

from kubelet.cli.mock_nodes import Counts, MockFleet, read_identities
from kubelet.config import NodeConfig
from kubelet.daemon.composition import node_environment
from schemas.error_roots import OperatorError
from schemas.identity_files import IdentityFiles, NodeIdentity
from schemas.process.logs import opened
from schemas.process.resources import raise_open_files_limit
from schemas.times import duration_text

_RESERVED = 64
"""Descriptors of a process that are not connections of its nodes."""
_REPORT_S = 1.0
_STOP_TIMEOUT_S = 20
_HEADINGS = ("seconds", *Counts._fields)


class FleetProcessError(OperatorError):
    """A process of the fleet has ended by itself; it has printed why."""


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
    with opened("kubelet", sys.stderr) as (log, _lines):
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
    return [
        *(sys.executable, "-P", "-m", "kubelet", "fleet"),
        *(
            "--identities",
            str(identities),
            "--broker",
            str(config.broker),
            "--relay",
            ",".join(config.relays),
        ),
        *(
            "--heartbeat",
            duration_text(int(config.heartbeat_s * 1000)),
            "--ttl",
            duration_text(config.ttl_ms),
        ),
        *("--part", part),
    ]


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
        """Print what starts, and the headings."""
        several = "process" if processes == 1 else "processes"
        self._print(f"{nodes:,} mock nodes in {processes} {several}; Ctrl-C stops them")
        self._print("  ".join(f"{heading:>9}" for heading in _HEADINGS))

    def show(self, counts: Counts) -> None:
        """Print a row, unless it repeats the last one."""
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
            FleetProcessError: one has ended by itself.
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
        raise FleetProcessError(f"a process of the fleet ended with exit code {await process.wait()}")

    def _sum(self) -> Counts:
        return Counts(*map(sum, zip(*self._counts, strict=True)))


async def _stopped(process: asyncio.subprocess.Process) -> None:
    """Stop ``process``, and await its end."""
    with suppress(ProcessLookupError):
        process.terminate()
    try:
        async with asyncio.timeout(_STOP_TIMEOUT_S):
            # Its output must be read to the end: it would block on a full pipe.
            await process.communicate()
    except TimeoutError:
        process.kill()
        await process.wait()
