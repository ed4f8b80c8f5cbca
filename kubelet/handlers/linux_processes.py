"""``linux.processes``: the processes that use the most CPU or memory.

Must not show the arguments of one, which can have passwords, unless the board's owner says so.
"""

import asyncio
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from kubelet.handlers.base import HandlerFactory
from kubelet.handlers.machine import LinuxHandler

INTERVAL_S = 0.5
USUAL_NUMBER = 20
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_ID = 2
"""Which field of /etc/passwd, from 0, is the number of the user."""
_STATES = {
    "R": "running",
    "S": "sleeping",
    "D": "disk sleep",
    "T": "stopped",
    "t": "stopped",
    "Z": "zombie",
    "I": "idle",
}


class Process(NamedTuple):
    """One line of the kernel's table. Times are in ticks, ``started`` since the boot."""

    pid: int
    name: str
    state: str
    used: int
    threads: int
    started: int
    pages: int


def parsed(pid: int, stat: str) -> Process | None:
    """Return the process that ``/proc/PID/stat`` states, by the numbers of fields in proc(5).

    A name can have any characters, a parenthesis among them: the last one ends it.
    """
    begin, end = stat.find("("), stat.rfind(")")
    fields = ["", "", *stat[end + 1 :].split()]  # fields[n - 1] is field n of proc(5)
    try:
        used = int(fields[13]) + int(fields[14])
        return Process(
            pid, stat[begin + 1 : end], fields[2], used, int(fields[19]), int(fields[21]), int(fields[23])
        )
    except (IndexError, ValueError):
        return None


class ProcessesHandler(LinuxHandler):
    """Answers with what ``/proc`` shows."""

    @property
    def lacks(self) -> str | None:
        """That other users' processes are hidden."""
        if self.machine.path("/proc/1").exists():
            return None
        return "processes of other users are hidden: the unit has ProtectProc=invisible"

    async def snapshot(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Return the greatest of those whose name has the part that is asked for.

        Raises:
            ToolFault: ``no_answer``: the arguments of one that hangs in the kernel cannot be read.
        """
        # Thousands of files: on a thread, so that the daemon does not wait.
        before_us, before = await asyncio.to_thread(self._table)
        await asyncio.sleep(INTERVAL_S)
        after_us, after = await asyncio.to_thread(self._table)
        passed_us = max(1, after_us - before_us)
        part = arguments.get("name", "")
        allowed = [each for each in after.values() if self.allows("names", each.name)]
        matching = [each for each in allowed if part in each.name]
        used = {each.pid: _ticks(each, before.get(each.pid)) for each in matching}
        by_memory = arguments.get("by") == "memory"
        matching.sort(key=lambda each: (-(each.pages if by_memory else used[each.pid]), each.pid))
        users = self._users()
        greatest = matching[: arguments.get("limit", USUAL_NUMBER)]
        shown = await self.calls.run(
            lambda: [self._shown(each, used[each.pid] * 1_000_000 / passed_us, users) for each in greatest]
        )
        return {"total": len(matching), "withheld": len(after) - len(allowed), "processes": shown}

    def _table(self) -> tuple[int, dict[int, Process]]:
        """Return when it began to read, in microseconds, and all processes by number.

        A board that is busy takes as long to read thousands as it waits between two tables.
        """
        began_us, found = self.machine.monotonic_us(), {}
        for entry in self.machine.path("/proc").iterdir():
            if entry.name.isdecimal() and (stat := self.machine.text(entry / "stat")) is not None:
                process = parsed(int(entry.name), stat)
                if process is not None:
                    found[process.pid] = process
        return began_us, found

    def _users(self) -> dict[int, str]:
        """Return the names of this machine's own users; to ask its name services would load these."""
        text = self.machine.text("/etc/passwd") or ""
        lines = (line.split(":", 3) for line in text.splitlines() if line.count(":") > _ID)
        return {int(fields[_ID]): fields[0] for fields in lines if fields[_ID].isdecimal()}

    def _shown(self, each: Process, ticks_per_s: float, users: Mapping[int, str]) -> dict[str, Any]:
        started_us = each.started * 1_000_000 // _TICKS_PER_S
        return {
            "pid": each.pid,
            "name": each.name,
            "user": _owner(self.machine.path(f"/proc/{each.pid}"), users),
            "state": _STATES.get(each.state, "other"),
            "cpu_pct": round(100 * ticks_per_s / _TICKS_PER_S, 1),
            "memory_bytes": each.pages * _PAGE_BYTES,
            "threads": each.threads,
            "started_ms": self.now_ms() - max(0, self.machine.boottime_us() - started_us) // 1000,
            "arguments": self._arguments(each.pid),
        }

    def _arguments(self, pid: int) -> str | None:
        if "arguments" not in self.ceiling.of("linux.processes").flags:
            return None
        text = self.machine.text(f"/proc/{pid}/cmdline")
        return None if text is None else text.rstrip("\0").replace("\0", " ")


def _ticks(after: Process, before: Process | None) -> int:
    """Return what a process has used in between; a number may have passed to another process."""
    if before is None or before.started != after.started:
        return after.used
    return max(0, after.used - before.used)


def _owner(directory: Path, users: Mapping[int, str]) -> str | None:
    try:
        return users.get(directory.stat().st_uid)
    except OSError:
        return None


HANDLER: HandlerFactory = ProcessesHandler
