"""The command line of the relay, run in the process of the test."""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from relay.cli.entry import main
from relay.cli.server_process import ServerPlan, serve
from tests.fakes.built_commands import build_commands_once
from tests.fakes.ports import unused_port

FREE_PORT = "FREE_PORT"
"""Stands for a port of this machine that is free."""


@dataclass(frozen=True)
class Outcome:
    """How a command ended, and what it printed."""

    code: int
    out: str
    err: str

    @property
    def error(self) -> str:
        """The one line that an error is, and nothing besides."""
        assert self.out == ""
        assert self.err.startswith("relay: ")
        assert self.err.count("\n") == 1
        return self.err.strip()


RelayCommand = Callable[..., Outcome]


def relay_command(
    state: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> RelayCommand:
    """Return what runs a command on the state directory ``state``."""
    build_commands_once(monkeypatch)
    # `relay run` would replace the process of the tests.
    monkeypatch.setattr("os.execv", lambda _program, command: serve(ServerPlan.from_json(command[-1])))

    def run(*arguments: object) -> Outcome:
        texts = [_with_a_port(str(argument)) for argument in arguments]
        return run_here(monkeypatch, capsys, *texts, "--state-dir", str(state))

    return run


def run_here(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str) -> Outcome:
    monkeypatch.setattr(sys, "argv", ["relay", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    captured = capsys.readouterr()
    return Outcome(int(ended.value.code or 0), captured.out, captured.err)


def _with_a_port(argument: str) -> str:
    return argument.replace(FREE_PORT, str(unused_port())) if FREE_PORT in argument else argument
