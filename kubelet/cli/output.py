"""How the node's commands print, and what to do after an enrolment.

Standard output holds results, standard error the rest. Must not decide what is printed.
"""

import json
import os
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import typer

from kubelet.config import SERVICE_STATE_DIR

_TIME = "_at_ms"
_UNIT = "edge-kubelet.service"
_UNIT_DIRECTORIES = ("etc/systemd/system", "usr/lib/systemd/system", "lib/systemd/system")
_SYSTEMD_RUNS = "run/systemd/system"
"""sd_booted(3)."""


def print_facts(facts: Mapping[str, Any], *, as_json: bool) -> None:
    """Print the result of a command, for programs or for people."""
    if as_json:
        typer.echo(json.dumps(facts))
        return
    shown = dict(_shown(name, value) for name, value in facts.items())
    width = max(len(name) for name in shown)
    for name, text in shown.items():
        typer.echo(f"{name:<{width}}  {text}")


def _shown(name: str, value: Any) -> tuple[str, str]:
    """Return a fact as people read it: a time in milliseconds as a date."""
    if name.endswith(_TIME):
        at = datetime.fromtimestamp(value // 1000, UTC)
        return name.removesuffix(_TIME), f"{at:%Y-%m-%d %H:%M} UTC"
    return name, _word(value)


def _word(value: Any) -> str:
    """Return a value as people read it."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "none" if value is None else str(value)


def say(text: str) -> None:
    """Print what is not part of the result."""
    typer.echo(text, err=True)


@dataclass(frozen=True, slots=True)
class EnrolledPlace:
    """Where a node was enrolled. ``root`` stands for the root of the file system.

    Attributes:
        usual: the state directory that `kubelet run` uses for this user unless another is named; None if it
            has to be.
    """

    state_dir: Path
    usual: Path | None
    root: Path = Path("/")

    @classmethod
    def here(cls, state_dir: Path, usual: Path | None) -> "EnrolledPlace":
        """Return the place on this machine."""
        return cls(Path(os.path.abspath(state_dir)), usual)  # noqa: PTH100 - links stay as they are named

    def next_step(self) -> str:
        """Return the command that lets the node run: its service where there is one, else the daemon."""
        if self.state_dir == SERVICE_STATE_DIR and (self.root / _SYSTEMD_RUNS).is_dir():
            if any((self.root / directory / _UNIT).exists() for directory in _UNIT_DIRECTORIES):
                return "systemctl enable --now edge-kubelet"
            return "edge-kubelet service install, and then: systemctl enable --now edge-kubelet"
        if self.state_dir == self.usual:
            return "edge-kubelet run"
        return f"edge-kubelet run --state-dir {shlex.quote(str(self.state_dir))}"
