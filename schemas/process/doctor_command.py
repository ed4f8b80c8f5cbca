"""What ``doctor`` does in both programs with its options. Must not know a check."""

import sys
from collections.abc import Callable, Mapping, Sequence

from schemas.error_roots import CommandLineError
from schemas.process.doctor import Check, examine
from schemas.unknown_names import none_of


def run_doctor(
    explained: Mapping[str, str],
    checks: Callable[[], Sequence[Check]],
    explain: str | None,
    *,
    as_json: bool,
) -> int:
    """Explain one check, or make all; return the exit code.

    ``explained`` has the explanations by the names of the checks; ``checks`` reads the settings, which an
    explanation does without.

    Raises:
        CommandLineError: there is no check to explain of that name.
        ConfigError: the settings cannot be used.
    """
    if explain is None:
        return examine(checks(), sys.stdout, as_json=as_json)
    if explain not in explained:
        raise CommandLineError(f"--explain: {none_of(explain, explained)}")
    sys.stdout.write(f"{explained[explain]}\n")
    return 0
