"""Recognises the broker that an earlier relay has left behind, and ends it.

The kernel ends the broker with its relay, but that takes a moment, and a suspended process does not end. A
process id is reused: the record also has when the process started, in ticks since the machine did, and the
process must have been started with the same configuration. Reads only what a confined service sees of /proc.
Must not end a process that the record does not name.
"""

import os
import select
import signal
from pathlib import Path

from schemas.files import PRIVATE, read_state, write_atomic

_END_TIMEOUT_S = 10.0
_MAX_BYTES = 256
_START_FIELD = 19  # of /proc/PID/stat behind the name; field 22 of all


def record(pid: int, path: Path) -> None:
    """Write into ``path`` which process ``pid`` is.

    Raises:
        OSError: it cannot be written, or there is no such process.
    """
    write_atomic(path, f"{pid} {_start_of(pid)}\n", PRIVATE)


def end_leftover(path: Path, config: Path) -> int | None:
    """End the process that ``path`` names if it runs with ``config``; return its id, None if none was ended.

    Raises:
        OSError: the record cannot be read.
    """
    try:
        pid_text, _, start = read_state(path, _MAX_BYTES).decode("ascii", "replace").strip().partition(" ")
        pid = int(pid_text)
        # By descriptor: from here on it is this process, and no later one with the same id.
        process = os.pidfd_open(pid) if pid > 1 else None
    except (FileNotFoundError, ProcessLookupError, ValueError, OverflowError):
        return None
    if process is None:
        return None
    try:
        if not _is_the_same(pid, start, config):
            return None
        _end(process)
    except ProcessLookupError:
        return None
    finally:
        os.close(process)
    return pid


def _is_the_same(pid: int, start: str, config: Path) -> bool:
    try:
        arguments = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        return _start_of(pid) == start and os.fsencode(config) in arguments
    except (FileNotFoundError, PermissionError):
        return False


def _end(process: int) -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        signal.pidfd_send_signal(process, number)
        signal.pidfd_send_signal(process, signal.SIGCONT)
        # The descriptor can be read once the process has ended, whether or not it was waited for.
        ended, _, _ = select.select([process], [], [], _END_TIMEOUT_S)
        if ended:
            return


def _start_of(pid: int) -> str:
    facts = Path(f"/proc/{pid}/stat").read_bytes()
    # The name, in parentheses, can hold anything.
    return facts.rpartition(b")")[2].split()[_START_FIELD].decode("ascii")
