"""Command lines that are built once for all tests: that takes longer than most commands run.

A process builds its own once. Only what is built is kept: a command parses, loads and runs as always.
"""

from functools import cache

import pytest
import typer

_built = cache(typer.main.get_command)


def build_commands_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the command lines that run in this process be built when they first run."""
    monkeypatch.setattr(typer.main, "get_command", _built)
