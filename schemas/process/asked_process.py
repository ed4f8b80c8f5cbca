"""The process of a state directory, as ``doctor`` finds it: what it does now, and with which settings.

Must not judge either, and must not print.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from schemas.process.doctor import NotCheckedError
from schemas.process.status_socket import NotRunningError, StalledError, read_status
from schemas.settings import Given, source_of
from schemas.settings_sources import Program, Sources

_STATE_DIR = "state_dir"
_OTHER_FORM = (LookupError, TypeError, AttributeError)
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
        """Ask the process of ``directory``, if there is one."""
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
        except _OTHER_FORM:
            return None
        given = {**reported, _STATE_DIR: Given(str(self.directory), "asked there")}
        return Sources(self.program.table, {}, None, None, (given,), ())
