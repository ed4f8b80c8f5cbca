"""Child processes of a demo, and the ports that they bind a moment after these are chosen.

Each process writes to a log of its own; when one fails, the error contains the last lines of its log. Must
not end a process that it did not start.

A port that was free a moment ago can be taken by another demo that starts at the same time: each claims its
ports by a name that can be bound once on a machine. The usual port is taken where it is free, else one below
the range from which the kernel serves outgoing connections.
"""

import asyncio
import os
import re
import signal
import socket
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager, suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

from attrs import define, field

from relay.broker.nats_server import is_free
from schemas.addresses import HostPort
from schemas.error_roots import OperatorError
from schemas.text import printable

_FIRST, _END = 20_000, 32_000
_APART = 61
"""Processes with neighbouring numbers begin this far from each other."""


class NoPortError(OperatorError):
    """No port of the loopback address is free."""


class ClaimedPorts(ExitStack):
    """The ports of one demo, claimed until it ends. A context."""

    def take(self, wanted: int | None = None) -> int:
        """Return ``wanted`` if it is given and free, else another port.

        Raises:
            NoPortError: no port is free.
        """
        start, count = os.getpid() * _APART, _END - _FIRST
        others = (_FIRST + (start + step) % count for step in range(count))
        for port in (*([] if wanted is None else [wanted]), *others):
            claim = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            with suppress(OSError):
                # In the abstract namespace: it ends with the process, and leaves no file.
                claim.bind(f"\0edge-kubelet-demo-port-{port}")
                if is_free(HostPort("127.0.0.1", port)):
                    self.enter_context(claim)
                    return port
            claim.close()
        raise NoPortError("no port is free on the loopback address")


_STOP_TIMEOUT_S = 8
_POLL_S = 0.02
_TAIL_LINES = 5
_END_SEEN_S = 0.5
_MAX_LINE = 400
_GRAVE = re.compile(r'"level": "(?:warning|error|critical)"')

_PROGRAMS = ("RELAY", "KUBELET")

ResultT = TypeVar("ResultT")


class StartError(OperatorError):
    """A process could not be started, or ended by itself; the text says which and why."""


@define(eq=False, repr=False)
class Processes:
    """The processes of one demo, with their logs in ``directory``. Use ``running``.

    Attributes:
        ports: the ports that they are to bind, claimed for as long as they run.
    """

    _directory: Path
    ports: ClaimedPorts
    _running: dict[str, asyncio.subprocess.Process] = field(init=False, factory=dict)

    @classmethod
    @asynccontextmanager
    async def running(cls, directory: Path) -> AsyncIterator["Processes"]:
        """Hold processes; at exit each gets SIGTERM and is awaited, the newest first.

        A cancellation waits until all have ended: a signal may come while they are stopped.
        """
        with ClaimedPorts() as ports:
            processes = cls(directory, ports)
            try:
                yield processes
            finally:
                await to_its_end(processes._stop_all())

    async def start(
        self, name: str, command: Sequence[str], variables: Mapping[str, str] = MappingProxyType({})
    ) -> int:
        """Start ``command``, with ``variables`` in its environment, and return its process id."""
        with self.log(name).open("ab") as log:
            # A session of its own: Ctrl-C reaches the demo alone, which then stops its parts in order.
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env={**_without_settings(os.environ), **variables},
            )
        self._running[name] = process
        return process.pid

    async def kill(self, name: str) -> None:
        """Kill the process called ``name``, and forget it."""
        process = self._running.pop(name)
        process.kill()
        await process.wait()

    async def stop(self, name: str) -> None:
        """Stop the process called ``name`` by SIGTERM, and forget it."""
        await _stopped(self._running.pop(name))

    def is_running(self, name: str) -> bool:
        """Return whether a process called ``name`` was started, and not stopped."""
        return name in self._running

    def pid(self, name: str) -> int:
        """Return the process id of the process called ``name``."""
        return self._running[name].pid

    async def output(self, command: Sequence[str]) -> str:
        """Run ``command`` to its end and return what it printed.

        Raises:
            StartError: it failed.
        """
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=_without_settings(os.environ),
        )
        out, err = await process.communicate()
        if process.returncode != 0:
            raise StartError(f"{' '.join(command)} failed: {err.decode('utf-8', 'replace').strip()}")
        return out.decode("utf-8")

    async def until_listening(self, port: int) -> None:
        """Wait until something accepts connections on ``port`` of the loopback address.

        Raises:
            StartError: one of the processes ended first.
        """
        while True:
            self.check()
            with suppress(OSError):
                _, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.close()
                await writer.wait_closed()
                return
            await asyncio.sleep(_POLL_S)

    def check(self) -> None:
        """Return if all are running.

        Raises:
            StartError: one is not.
        """
        for name, process in self._running.items():
            if process.returncode is not None:
                last = " | ".join(printable(line, _MAX_LINE) for line in self._lines(name)[-_TAIL_LINES:])
                raise StartError(f"{name} ended with status {process.returncode}: {last}")

    async def during(self, work: Coroutine[Any, Any, ResultT]) -> ResultT:
        """Return the result of ``work``, which needs all of the processes.

        Raises:
            StartError: one of them ended first; ``work`` is cancelled.
        """
        ended = asyncio.create_task(self._until_one_ends())
        working = asyncio.create_task(work)
        try:
            await asyncio.wait({ended, working}, return_when=asyncio.FIRST_COMPLETED)
            if working.done() and working.exception() is not None:
                # What was connected to a process fails a moment before its end is seen.
                await asyncio.wait({ended}, timeout=_END_SEEN_S)
            self.check()
            return await working
        finally:
            for task in (ended, working):
                task.cancel()
            await asyncio.wait({ended, working})

    async def _until_one_ends(self) -> None:
        waits = [asyncio.ensure_future(process.wait()) for process in self._running.values()]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()

    async def _stop_all(self) -> None:
        for process in reversed(self._running.values()):
            await _stopped(process)

    def last_lines(self) -> str:
        """Return the last warning or error of each log, or else its last line, in one line."""
        shown = []
        for name in self._running:
            lines = self._lines(name)
            last = ([line for line in lines if _GRAVE.search(line)] or lines or ["no output"])[-1]
            shown.append(f"{name}: {printable(last, _MAX_LINE)}")
        return "; ".join(shown)

    def log(self, name: str) -> Path:
        """Return the log of the process called ``name``."""
        return self._directory / f"{name}.log"

    def _lines(self, name: str) -> list[str]:
        return self.log(name).read_text("utf-8", "replace").splitlines()


async def to_its_end(work: Coroutine[Any, Any, ResultT]) -> ResultT:
    """Return the result of ``work``; a cancellation in the meantime takes effect once it is done."""
    working, cancelled = asyncio.ensure_future(work), None
    while not working.done():
        try:
            await asyncio.shield(working)
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled
    return working.result()


async def _stopped(process: asyncio.subprocess.Process) -> None:
    if process.returncode is not None:
        return
    process.send_signal(signal.SIGTERM)
    try:
        async with asyncio.timeout(_STOP_TIMEOUT_S):
            await process.wait()
    except TimeoutError:
        with suppress(ProcessLookupError):  # it has ended in this moment
            process.kill()
        await process.wait()


def _without_settings(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a process whose settings are its options alone."""
    kept = {name: value for name, value in environment.items() if name.partition("_")[0] not in _PROGRAMS}
    return kept | {f"{program}_CONFIG": "" for program in _PROGRAMS}
