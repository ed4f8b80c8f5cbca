"""How ``status`` shows what a process does now: aligned lines, once or again and again, or JSON.

Must not read the process: a callable does, and another makes the lines.
"""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from schemas.error_roots import PeerError
from schemas.process.doctor import NotCheckedError
from schemas.process.status_socket import NotRunningError, StalledError, read_status
from schemas.settings import Given, Program, Sources, source_of
from schemas.text import printable
from schemas.times import duration_text

WATCH_INTERVAL_S = 2.0
_HOME_AND_CLEAR = "\x1b[H\x1b[J"
_ONE_SECOND_MS = 1000
_OTHER_FORM = (LookupError, TypeError, ValueError, AttributeError, OverflowError)
"""What it raises to read a document that has another form."""


class AnotherVersionError(PeerError):
    """The status is not of the form that this version shows."""


Status = Mapping[str, Any]
StatusLines = Sequence[tuple[str, str]]
"""What is shown, a name and a text of each line."""


def show(  # noqa: PLR0913 - what comes in from outside
    read: Callable[[], Status],
    lines_of: Callable[[Status], StatusLines],
    *,
    as_json: bool,
    watch: bool,
    stream: TextIO,
    sleep: Callable[[float], None] = time.sleep,
) -> bool:
    """Print what ``read`` returns; with ``watch`` until interrupted. Return whether it is ready.

    JSON is one object a line.

    Raises:
        AnotherVersionError: a part of the status is missing, or of another form.
    """
    while True:
        status = read()
        try:
            is_ready = bool(status["ready"])
            text = json.dumps(status) if as_json else _aligned(lines_of(status))
        except _OTHER_FORM:
            raise AnotherVersionError(
                "the process is of another version than this command: restart it"
            ) from None
        if watch and not as_json and stream.isatty():
            stream.write(_HOME_AND_CLEAR)
        stream.write(text + "\n")
        stream.flush()
        if not watch:
            return is_ready
        sleep(WATCH_INTERVAL_S)


def _aligned(lines: StatusLines) -> str:
    width = max(len(name) for name, _ in lines)
    return "\n".join(f"{name:<{width}}  {printable(text)}" for name, text in lines)


def seconds_text(seconds: float) -> str:
    """Return a length of time, in whole seconds."""
    return duration_text(int(seconds) * _ONE_SECOND_MS) or "0s"


def days_text(ms: int) -> str:
    """Return a length of time that is given in milliseconds, in days where it is longer than two."""
    days = ms // 86_400_000
    return f"{days} days" if abs(days) > 1 else duration_text(max(0, ms) // 1000 * 1000) or "0s"


def readiness_text(status: Status) -> str:
    """Return whether calls flow, and what keeps them from it."""
    if status["ready"]:
        return "yes"
    missing = [
        f"{name}: {health.get('state', 'not ready')}"
        for name, health in status["subsystems"].items()
        if not (health["ready"] and health["live"])
    ]
    return "no; " + "; ".join(missing)


def process_text(status: Status) -> str:
    """Return what the process is and uses."""
    watchdog_s = status["watchdog_s"]
    watched = f"watchdog {watchdog_s:g} s" if watchdog_s else "no watchdog"
    memory = f"{status['resident_bytes'] / (1 << 20):.1f} MiB"
    used = f"{status['open_files']} of {status['max_open_files']} files, {status['tasks']} tasks"
    return f"pid {status['pid']}, up {seconds_text(status['uptime_s'])}, {memory}, {used}, {watched}"


def outcomes_text(outcomes: Sequence[Mapping[str, Any]]) -> str:
    """Return how calls ended: each outcome has ``code``, ``hop`` and ``count``."""
    if not outcomes:
        return "none yet"
    return ", ".join(
        f"{one['count']} {one['code']}" + (f" ({one['hop']})" if one["hop"] else "") for one in outcomes
    )


_STATE_DIR = "state_dir"
_OTHER_SETTINGS = (LookupError, TypeError, AttributeError)
"""What it raises to read settings that a process of another version tells in another form."""


@dataclass(frozen=True, slots=True)
class AskedProcess:
    """The process of ``program`` that has the state directory ``directory``.

    Attributes:
        answer: what it does now; or why it does not say so.
    """

    program: Program
    directory: Path
    answer: Mapping[str, Any] | NotRunningError | StalledError | OSError

    @classmethod
    def ask(cls, program: Program, directory: Path) -> "AskedProcess":
        try:
            return cls(program, directory, read_status(directory))
        except (NotRunningError, StalledError, OSError) as error:
            return cls(program, directory, error)

    @property
    def status(self) -> Mapping[str, Any]:
        """What it does now.

        Raises:
            NotCheckedError: it does not say so; the check ``process`` tells why.
        """
        if isinstance(self.answer, NotRunningError):
            raise NotCheckedError(f"the {self.program.name} does not run")
        if isinstance(self.answer, Exception):
            raise NotCheckedError(f"the {self.program.name} does not answer")
        return self.answer

    def sources(self) -> Sources | None:
        """Return the settings that it runs with, as what it was given; None if its answer lacks them.

        The state directory is the one in which it was asked.
        """
        if isinstance(self.answer, Exception):
            return None
        try:
            reported = source_of(self.answer["settings"])
        except _OTHER_SETTINGS:
            return None
        given = {**reported, _STATE_DIR: Given(str(self.directory), "asked there")}
        return Sources(self.program.table, {}, None, None, (given,), ())
