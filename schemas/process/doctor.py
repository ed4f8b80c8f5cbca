"""Checks that an operator runs when something does not work: each has what was found, and what to do.

A check that cannot be made has failed. Must not repair anything, and must not know what is checked.
"""

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import TextIO

from schemas.error_roots import EdgeError
from schemas.text import printable

EXIT_CODES = {0: 0, 1: 1, 2: 3}
"""By severity: 0 all is well; 1 something will fail, or is not safe; 3 calls cannot flow as things are."""


class Severity(IntEnum):
    """How bad it is."""

    OK = 0
    WARNING = 1
    FAILURE = 2


@dataclass(frozen=True, slots=True)
class Finding:
    """What a check has found, and what to do; ``fix`` is empty where there is nothing to do."""

    severity: Severity
    found: str
    fix: str = ""

    @classmethod
    def good(cls, found: str) -> "Finding":
        """Return that all is well."""
        return cls(Severity.OK, found)

    @classmethod
    def warning(cls, found: str, fix: str) -> "Finding":
        """Return that something will fail, or is not safe."""
        return cls(Severity.WARNING, found, fix)

    @classmethod
    def failure(cls, found: str, fix: str) -> "Finding":
        """Return that calls cannot flow."""
        return cls(Severity.FAILURE, found, fix)


@dataclass(frozen=True, slots=True)
class Check:
    """One check.

    Attributes:
        explanation: what is checked and how, why it matters, and what to do, for ``--explain``.
        look: makes the check. It may raise OSError or an expected error: that is a failure.
    """

    name: str
    explanation: str
    look: Callable[[], Finding]


def examine(checks: Sequence[Check], stream: TextIO = sys.stdout, *, as_json: bool) -> int:
    """Make ``checks`` in order, print one line each as they end, and return the exit code."""
    worst = Severity.OK
    width = max(len(check.name) for check in checks)
    for check in checks:
        finding = _found(check)
        worst = max(worst, finding.severity)
        word = finding.severity.name.lower()
        if as_json:
            facts = {"check": check.name, "severity": word, "found": finding.found, "fix": finding.fix}
            stream.write(json.dumps(facts) + "\n")
        else:
            fix = f": {finding.fix}" if finding.fix else ""
            shown = _coloured(f"{word:<7}", finding.severity, stream)
            stream.write(f"{shown}  {check.name:<{width}}  {printable(finding.found + fix)}\n")
        stream.flush()
    return EXIT_CODES[worst]


def _found(check: Check) -> Finding:
    try:
        return check.look()
    except (EdgeError, OSError) as error:
        return Finding.failure(str(error), f"see --explain {check.name}")


def _coloured(word: str, severity: Severity, stream: TextIO) -> str:
    if not stream.isatty():
        return word
    return f"\x1b[{(32, 33, 31)[severity]}m{word}\x1b[0m"
