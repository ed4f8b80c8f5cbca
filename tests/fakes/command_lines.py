"""The command lines of both programs, run in the process of the test, from the entry point to the exit code.

Must not run what becomes or serves a daemon: that takes the process over.
"""

import os
import sys
from dataclasses import dataclass

import pytest

import kubelet.cli.commands
import relay.cli.entry
from tests.fakes.built_commands import build_commands_once

_MAINS = {"kubelet": kubelet.cli.commands.main, "relay": relay.cli.entry.main}


@dataclass(frozen=True, slots=True)
class Ended:
    """How a command ended, and what it printed."""

    code: int
    out: str
    err: str


class CommandLines:
    """Both programs, with ``settings`` as the only ones that the environment makes."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        captured: pytest.CaptureFixture[str],
        settings: dict[str, str],
    ) -> None:
        build_commands_once(monkeypatch)
        self._patch = monkeypatch
        self._captured = captured
        for name in _settings_of_the_environment():
            monkeypatch.delenv(name)
        for name, value in {"RELAY_CONFIG": "", "KUBELET_CONFIG": "", **settings}.items():
            monkeypatch.setenv(name, value)

    def run(self, program: str, *arguments: str) -> Ended:
        """Run a command of ``program``."""
        self._patch.setattr(sys, "argv", [program, *arguments])
        with pytest.raises(SystemExit) as ended:
            _MAINS[program]()
        out, err = self._captured.readouterr()
        return Ended(int(ended.value.code or 0), out, err)


def _settings_of_the_environment() -> list[str]:
    return [name for name in os.environ if name.startswith(("RELAY_", "KUBELET_"))]
