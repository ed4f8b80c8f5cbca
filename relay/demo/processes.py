"""Child processes of a demo: started, awaited, and ended.

Each writes to a log of its own; when one fails, the error contains the last lines of its log. Must not end a
process that it did not start.
"""

import asyncio
import os
import shutil
import signal
import socket
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from schemas.error_roots import OperatorError

_STOP_TIMEOUT_S = 8
_POLL_S = 0.02
_TAIL_LINES = 5


class StartError(OperatorError):
    """A process could not be started, or ended by itself; the text says which and why."""


class Processes:
    """The processes of one demo, with their logs in ``directory``. Use ``running``."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._running: dict[str, asyncio.subprocess.Process] = {}

    @classmethod
    @asynccontextmanager
    async def running(cls, directory: Path) -> AsyncIterator["Processes"]:
        """Hold processes; at exit each gets SIGTERM and is awaited, the newest first."""
        processes = cls(directory)
        try:
            yield processes
        finally:
            await processes._stop_all()

    async def start(self, name: str, command: Sequence[str]) -> int:
        """Start ``command`` and return its process id."""
        with self._log(name).open("ab") as log:
            # A session of its own: Ctrl-C reaches the demo alone, which then stops its parts in order.
            process = await asyncio.create_subprocess_exec(
                *command, stdin=asyncio.subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        self._running[name] = process
        return process.pid

    async def kill(self, name: str) -> None:
        """Kill the process called ``name``, and forget it."""
        process = self._running.pop(name)
        process.kill()
        await process.wait()

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
                raise StartError(f"{name} ended with status {process.returncode}: {self._tail(name)}")

    async def until_one_ends(self) -> None:
        """Wait until any of them ends by itself."""
        waits = [asyncio.ensure_future(process.wait()) for process in self._running.values()]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()

    async def _stop_all(self) -> None:
        for process in reversed(self._running.values()):
            if process.returncode is not None:
                continue
            process.send_signal(signal.SIGTERM)
            try:
                async with asyncio.timeout(_STOP_TIMEOUT_S):
                    await process.wait()
            except TimeoutError:
                process.kill()
                await process.wait()

    def _log(self, name: str) -> Path:
        return self._directory / f"{name}.log"

    def _tail(self, name: str) -> str:
        lines = self._log(name).read_text("utf-8", "replace").splitlines()
        return " | ".join(lines[-_TAIL_LINES:])


def find_program(name: str) -> str:
    """Return the path of a program of this environment, or of the PATH.

    Raises:
        StartError: there is none.
    """
    beside = os.fspath(Path(sys.executable).parent)
    found = shutil.which(name, path=beside) or shutil.which(name)
    if found is None:
        raise StartError(f"{name} is not installed: pip install 'edge-kubelet[demo]'")
    return found


def free_port(wanted: int) -> int:
    """Return ``wanted`` if it is free on the loopback address, else another free port."""
    for port in (wanted, 0):
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            chosen: int = probe.getsockname()[1]
            return chosen
    raise StartError("no port is free on the loopback address")
