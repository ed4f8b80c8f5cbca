"""What the handlers of ``linux.*`` read: small files of the kernel below a root, and programs of the system.

Tests pass a root of their own and programs that they script. Must not block on what may hang: files below
``/proc`` and ``/sys`` answer at once, and everything else is a program with a deadline. Must not use a shell:
arguments of a command are the caller's text.
"""

import asyncio
import json
import os
import signal
import time
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, MutableMapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from structlog.typing import FilteringBoundLogger

from kubelet.handlers.base import BuiltInHandler, ToolFault
from kubelet.handlers.disks import DaemonThreadPool
from schemas.strict_json import MAX_SAFE_INTEGER


class Printed(NamedTuple):
    """What a program has printed on its standard output, and its exit code; None if it was stopped."""

    text: str
    code: int | None


_KILLED_WITHIN_S = 0.5


async def printed_by(
    command: Sequence[str],
    limit: int = 64 * 1024,
    within_s: float | None = None,
    held: MutableMapping[str, Process] | None = None,
) -> Printed:
    """Return what ``command`` prints, of which ``limit`` bytes are read; then it is stopped.

    For handlers of packages too. It is stopped too after ``within_s``, and where its caller is cancelled, as
    the deadline of a command does, with the programs that it has started. One that a disk or a share holds
    in the kernel ends when that answers: nothing waits for it, and while it is in ``held`` it is not started
    again, as if stopped at once.

    Raises:
        OSError: it cannot be started.
    """
    if held is not None and command[0] in held and held[command[0]].returncode is None:
        return Printed("", None)
    process = await asyncio.create_subprocess_exec(
        *command, stdin=DEVNULL, stdout=PIPE, stderr=DEVNULL, process_group=0
    )
    data, is_over = bytearray(), False
    try:
        with suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                while process.stdout and len(data) < limit and (more := await process.stdout.read(limit)):
                    data += more
                if len(data) < limit:
                    await process.wait()
        code = process.returncode
        is_over = code is not None and process.stdout is not None and process.stdout.at_eof()
    finally:
        if not is_over:
            # Also where it has ended itself: what it started may still hold what is read here.
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            try:
                async with asyncio.timeout(_KILLED_WITHIN_S):
                    await process.wait()
            except TimeoutError:
                if held is not None:
                    held[command[0]] = process
            # What has left its group, as a daemon does, may hold the pipe for as long as it runs.
            reader: Any = process.stdout
            reader._transport.close()  # noqa: SLF001 - asyncio has no public way
    return Printed(data[:limit].decode("utf-8", "replace"), code)


def exact(number: int) -> int:
    """Return ``number``, or the nearest that a frame can hold."""
    return min(max(number, -MAX_SAFE_INTEGER), MAX_SAFE_INTEGER)


T = TypeVar("T")

LONGEST_FILE = 64 * 1024
LONGEST_OUTPUT = 4 * 1024 * 1024
PROGRAM_TIMEOUT_S = 4.0
"""Below the deadline of the capabilities, so that an agent reads why there is no answer."""


class LinuxMachine:
    """The machine below ``root``. ``monotonic_us`` counts as systemd does: microseconds since the boot.

    ``boottime_us`` counts those too in which the machine was suspended, as the kernel does of processes.

    Attributes:
        held: the programs that were killed and have not ended, by name.
    """

    def __init__(
        self,
        root: Path = Path("/"),
        run: Callable[[Sequence[str], int, float], Awaitable[Printed]] | None = None,
        monotonic_us: Callable[[], int] = lambda: time.monotonic_ns() // 1000,
        boottime_us: Callable[[], int] = lambda: time.clock_gettime_ns(time.CLOCK_BOOTTIME) // 1000,
    ) -> None:
        self._root = root
        self.held: dict[str, Process] = {}
        self.run = run or partial(printed_by, held=self.held)
        self.monotonic_us = monotonic_us
        self.boottime_us = boottime_us

    def path(self, path: str) -> Path:
        """Return ``path``, which is absolute, below the root."""
        return self._root / path.lstrip("/")

    def text(self, path: str | Path) -> str | None:
        """Return the beginning of a file, without blanks at its ends; None if it cannot be read."""
        where = path if isinstance(path, Path) else self.path(path)
        try:
            with where.open("rb") as file:
                return file.read(LONGEST_FILE).decode("utf-8", "replace").strip()
        except OSError:
            return None

    def number(self, path: str | Path) -> int | None:
        """Return the decimal number that a file has, cut to what a frame can hold; None if it has none."""
        text = self.text(path)
        try:
            return None if text is None else exact(int(text))
        except ValueError:
            return None

    def matching(self, directory: str, pattern: str) -> list[Path]:
        """Return what is in ``directory`` by the glob ``pattern``, sorted; nothing if it cannot be listed."""
        try:
            return sorted(self.path(directory).glob(pattern))
        except OSError:
            return []

    async def printed(
        self, *command: str, within_s: float = PROGRAM_TIMEOUT_S, codes: Collection[int] = (0,)
    ) -> str:
        """Return what a program prints before it ends with one of ``codes``.

        Raises:
            ToolFault: ``program_missing``, ``program_failed``, or ``no_answer`` after ``within_s``.
        """
        try:
            printed = await self.run(command, LONGEST_OUTPUT, within_s)
        except (OSError, RuntimeError) as error:  # asyncio needs a thread for it, and there may be none left
            raise ToolFault("program_missing", str(error)) from error
        if printed.code is None:
            raise ToolFault("no_answer", command[0])
        if printed.code not in codes:
            raise ToolFault("program_failed", f"{command[0]} ends with {printed.code}: {printed.text[:256]}")
        return printed.text


_WAITING = 2


class BlockingCalls:
    """Runs what may block in at most ``most`` threads: what does not return costs calls of its own alone.

    Further calls wait for a thread, at most ``_WAITING`` for each.
    """

    def __init__(self, most: int = 2) -> None:
        self._threads = DaemonThreadPool(limit=most)
        self._most = most
        self._waiting = 0

    async def run(self, call: Callable[[], T], within_s: float = PROGRAM_TIMEOUT_S) -> T:
        """Return what ``call`` returns, or raise what it raises.

        Raises:
            ToolFault: ``no_answer``: it does not return in time, or those before it have not.
        """
        if self._waiting >= (1 + _WAITING) * self._most:
            raise ToolFault("no_answer", "what was called before has not returned")
        self._waiting += 1
        future = self._threads.submit(call)
        future.add_done_callback(self._returned)
        try:
            self._threads.start_missing()
        except RuntimeError as error:
            raise ToolFault("no_answer", str(error)) from error
        try:
            async with asyncio.timeout(within_s):
                await asyncio.wait([future])
                return future.result()
        except TimeoutError:
            raise ToolFault("no_answer", "it does not return") from None

    def _returned(self, future: "asyncio.Future[Any]") -> None:
        self._waiting -= 1
        if not future.cancelled():
            future.exception()  # the call that asked for it may have ended long ago


def lacks_systemd(machine: LinuxMachine) -> str | None:
    """Return that systemd does not run on ``machine``; None if it does (sd_booted(3))."""
    return None if machine.path("/run/systemd/system").is_dir() else "systemd does not run"


class LinuxHandler(BuiltInHandler):
    """A handler with the ``machine`` that it reads, and a method for each verb of its kind.

    Attributes:
        calls: of what may block.
    """

    def __init__(
        self,
        capability: Mapping[str, Any],
        node_id: str,
        now_ms: Callable[[], int],
        log: FilteringBoundLogger,
        machine: LinuxMachine | None = None,
    ) -> None:
        super().__init__(capability, node_id, now_ms, log)
        self.machine = machine or LinuxMachine()
        self.calls = BlockingCalls()
        self.prepare()

    def prepare(self) -> None:
        """Make what the handler keeps between calls."""

    def allows(self, what: str, name: str) -> bool:
        """Return whether the board's owner lets ``name``, which was resolved, be asked for."""
        return self.ceiling.allows(self.capability["kind"], what, name)

    def check_allowed(self, what: str, name: str) -> None:
        """Check that ``name``, which was asked for and then resolved, is one that the owner allows.

        Raises:
            OutsideCeilingError: it is not.
        """
        self.ceiling.check(self.capability["kind"], what, name)

    async def invoke(self, verb: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Return what the method called ``verb`` does, with this node's id and the time.

        Raises:
            ToolFault: it failed for a reason that the row states.
        """
        answer: dict[str, Any] = await getattr(self, verb)(arguments)
        return {"node_id": self.node_id, "ts_ms": self.now_ms(), **answer}

    def at_ms(self, monotonic_us: int) -> int:
        """Return when ``monotonic_us`` was, in milliseconds since the epoch."""
        return self.now_ms() - max(0, self.machine.monotonic_us() - monotonic_us) // 1000


MOST_BYTES = 160 * 1024
"""Of the items of one answer, as JSON; a frame has room for little more."""


def fitting(items: Iterable[dict[str, Any]], most_bytes: int = MOST_BYTES) -> list[dict[str, Any]]:
    """Return the first of ``items`` that have ``most_bytes`` as JSON together."""
    shown, left = [], most_bytes
    for item in items:
        left -= len(json.dumps(item)) + 1
        if left < 0:
            break
        shown.append(item)
    return shown


def page(items: Sequence[Any], start: int, most: int) -> tuple[Sequence[Any], int | None]:
    """Return at most ``most`` of ``items`` from ``start``, and where the next page starts."""
    end = start + most
    return items[start:end], end if end < len(items) else None
