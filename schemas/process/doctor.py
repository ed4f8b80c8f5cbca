"""Checks that an operator runs when something does not work: each has what was found, and what to do.

A check that cannot be made has failed, or is skipped: where another check says why, or it takes more rights
than those of the group that sees what is no secret. Must not repair anything,
and must not know what is checked.
"""

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Generic, NamedTuple, TextIO, TypeVar

from schemas.error_roots import CommandLineError, EdgeError
from schemas.files import is_kept_from_member, os_error_text
from schemas.process.command_errors import EXIT_CANNOT_RUN
from schemas.text import none_of, printable


class Severity(IntEnum):
    """How bad it is. What is skipped says nothing: another check says why, or root must make it."""

    SKIPPED = 0
    OK = 1
    WARNING = 2
    FAILURE = 3


class NotCheckedError(EdgeError):
    """The check cannot be made, and another one says why; the text is the reason in short."""


@dataclass(frozen=True, slots=True)
class Finding:
    """What a check has found, and what to do; ``fix`` is empty where there is nothing to do.

    Good: all is well, with a hint if there is a better way. A warning: something will fail, or is not safe. A
    failure: calls cannot flow.
    """

    severity: Severity
    found: str
    fix: str = ""

    @classmethod
    def good(cls, found: str, hint: str = "") -> "Finding":
        return cls(Severity.OK, found, hint)

    @classmethod
    def warning(cls, found: str, fix: str) -> "Finding":
        return cls(Severity.WARNING, found, fix)

    @classmethod
    def failure(cls, found: str, fix: str) -> "Finding":
        return cls(Severity.FAILURE, found, fix)


Subject = TypeVar("Subject")


class DoctorCheck(NamedTuple, Generic[Subject]):
    """A check of a doctor: its name, how it looks at what is checked, and what ``--explain`` says of it.

    ``look`` may raise OSError or an expected error: that is a failure; or NotCheckedError.
    """

    name: str
    look: Callable[[Subject], Finding]
    explanation: str


class DoctorChecks(list[DoctorCheck[Subject]]):
    """The checks of one doctor, in the order in which they are added."""

    def add(
        self, name: str, explanation: str
    ) -> Callable[[Callable[[Subject], Finding]], Callable[[Subject], Finding]]:
        """Add what it decorates; ``explanation`` says what that looks at, why, and what to do."""

        def added(look: Callable[[Subject], Finding]) -> Callable[[Subject], Finding]:
            self.append(DoctorCheck(name, look, explanation))
            return look

        return added


def examine(
    rows: Sequence[DoctorCheck[Subject]],
    subject: Subject,
    stream: TextIO,
    *,
    as_json: bool,
    strict: bool = False,
) -> int:
    """Make the checks of ``rows`` in order, print one line each as they end, and return the exit code.

    0: calls flow, whatever the warnings; 1: there is a warning, and ``strict``; 3: calls cannot flow.
    """
    worst = Severity.SKIPPED
    width = max(len(row.name) for row in rows)
    for row in rows:
        finding = made(row, subject)
        worst = max(worst, finding.severity)
        word = finding.severity.name.lower()
        if as_json:
            facts = {"check": row.name, "severity": word, "found": finding.found, "fix": finding.fix}
            stream.write(json.dumps(facts) + "\n")
        else:
            fix = f": {finding.fix}" if finding.fix else ""
            shown = _coloured(f"{word:<7}", finding.severity, stream)
            stream.write(f"{shown}  {row.name:<{width}}  {printable(finding.found + fix)}\n")
        stream.flush()
    if worst is Severity.FAILURE:
        return EXIT_CANNOT_RUN
    return int(strict and worst is Severity.WARNING)


def made(row: DoctorCheck[Subject], subject: Subject) -> Finding:
    """Make the check ``row`` of ``subject``; return what it has found, or why it cannot be made."""
    try:
        return row.look(subject)
    except NotCheckedError as error:
        return Finding(Severity.SKIPPED, f"not checked: {error}")
    except (EdgeError, OSError) as error:
        if isinstance(error, OSError) and is_kept_from_member(error):
            return Finding(Severity.SKIPPED, f"not checked: {os_error_text(error)}")
        text = os_error_text(error) if isinstance(error, OSError) else str(error)
        return Finding.failure(text, f"see --explain {row.name}")


_COLOURS = {Severity.SKIPPED: 2, Severity.OK: 32, Severity.WARNING: 33, Severity.FAILURE: 31}


def _coloured(word: str, severity: Severity, stream: TextIO) -> str:
    if not stream.isatty():
        return word
    return f"\x1b[{_COLOURS[severity]}m{word}\x1b[0m"


def run_doctor(
    rows: Sequence[DoctorCheck[Subject]],
    subject: Callable[[], Subject],
    explain: str | None,
    *,
    as_json: bool,
    strict: bool = False,
) -> int:
    """Explain one check, or make all in the order of ``rows``; return the exit code.

    ``subject`` reads the settings, which an explanation does without.

    Raises:
        CommandLineError: there is no check to explain of that name.
        ConfigError: the settings cannot be used.
    """
    if explain is None:
        return examine(rows, subject(), sys.stdout, as_json=as_json, strict=strict)
    explained = {row.name: row.explanation for row in rows}
    if explain not in explained:
        raise CommandLineError(f"--explain: {none_of(explain, explained)}")
    sys.stdout.write(f"{explained[explain]}\n")
    return 0
