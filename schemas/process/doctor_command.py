"""What ``doctor`` does in both programs with its options. Must not know a check."""

import sys
from collections.abc import Sequence

from schemas.error_roots import CommandLineError
from schemas.process.doctor import Check, examine
from schemas.unknown_names import none_of


def run_doctor(checks: Sequence[Check], explain: str | None, *, as_json: bool) -> int:
    """Explain one check, or make all; return the exit code.

    Raises:
        CommandLineError: there is no check to explain of that name.
    """
    if explain is None:
        return examine(checks, sys.stdout, as_json=as_json)
    explained = {check.name: check.explanation for check in checks}
    if explain not in explained:
        raise CommandLineError(f"--explain: {none_of(explain, explained)}")
    sys.stdout.write(f"{explained[explain]}\n")
    return 0
