"""Attacker: a user who may write into the directory from which an operator, often as root, starts a
program. Tried: modules there that are called as the standard library's, ours and our dependencies'.

What must happen: no program that starts another lets it run them.
"""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from kubelet.session.renewal import installer
from relay.cli.demo.local_system import Plan, fleet_command, kubelet_command, relay_command
from relay.cli.demo.processes import ClaimedPorts
from schemas.identity_files import IdentityFiles

BOUND_S = 60
NAMES = ("json", "asyncio", "typing", "structlog", "schemas", "kubelet", "relay", "sitecustomize")


class Trap:
    """A directory of modules that leave a mark when they are run."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._mark = directory / "ran"
        for name in NAMES:
            (directory / f"{name}.py").write_text(
                f"open({str(self._mark)!r}, 'a').write(__name__)\nraise SystemExit(77)\n"
            )

    @property
    def sprung(self) -> bool:
        return self._mark.exists()

    def run(self, *command: str) -> int:
        """Return how ``command`` ended in this directory."""
        done = subprocess.run(
            command, cwd=self.directory, check=False, capture_output=True, timeout=BOUND_S, text=True
        )
        return done.returncode


@pytest.fixture
def trap(tmp_path: Path) -> Trap:
    directory = tmp_path / "trap"
    directory.mkdir()
    return Trap(directory)


def test_the_trap_works(trap: Trap) -> None:
    assert trap.run(sys.executable, "-m", "kubelet", "--help") == 77
    assert trap.sprung


def test_the_daemon_that_the_command_becomes(trap: Trap, tmp_path: Path) -> None:
    where = ["--broker", "127.0.0.1:9", "--relay", "http://127.0.0.1:9", "--state-dir", str(tmp_path)]
    # 3: it got as far as to miss the identity.
    assert trap.run(sys.executable, "-P", "-m", "kubelet", "run", *where) == 3
    assert not trap.sprung


async def test_what_installs_a_renewed_leaf(
    trap: Trap, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(trap.directory)
    reason = await installer(IdentityFiles(tmp_path))({"certificate": "", "roots": ""})
    assert reason is not None
    assert reason.startswith("kubelet: ")
    assert not trap.sprung


@pytest.mark.parametrize("command", [relay_command, kubelet_command, fleet_command])
def test_every_part_of_the_demo(trap: Trap, tmp_path: Path, command: Callable[[Plan], list[str]]) -> None:
    with ClaimedPorts() as ports:
        interpreter, *told = command(Plan.below(tmp_path, ports))
    options = told[: told.index("-m") + 2]
    assert trap.run(interpreter, *options, "--help") == 0
    assert not trap.sprung
