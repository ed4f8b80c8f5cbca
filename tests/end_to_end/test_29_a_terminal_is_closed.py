"""29. An operator closes the terminal in which a program runs: it ends, and its state can be used again.

Steps: make a CA and an identity · start each program in a terminal of its own · close the terminal · start it
again under nohup, as what is to go on.
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.fakes.polling import wait_until
from tests.fakes.ports import unused_port

pytestmark = pytest.mark.integration

BOUND_S = 60
PYTHON = (sys.executable, "-P", "-m")


def made(*command: str) -> None:
    subprocess.run([*PYTHON, *command], capture_output=True, timeout=BOUND_S, check=True)


def command_of(program: str, state: Path) -> list[str]:
    """Return the command of the daemon, whose state is made."""
    place = ("--state-dir", str(state))
    port = str(unused_port())
    if program == "relay":
        made("relay", "ca", "init", *place)
        return [*PYTHON, "relay", "run", *place, "--no-broker", "--listen", f"127.0.0.1:{port}"]
    made("kubelet", "init", *place)
    where = ("--relay", "http://127.0.0.1:1", "--no-broker", "--loopback-port", port)
    return [*PYTHON, "kubelet", "run", *place, *where]


@contextmanager
def in_a_terminal(command: list[str], state: Path) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """Hold the program, which serves, and its terminal."""
    terminal, inner = os.openpty()
    process = subprocess.Popen(
        ["/usr/bin/setsid", "--ctty", *command],
        stdin=inner,
        stdout=inner,
        stderr=inner,
        cwd=state,  # nohup writes a file there
    )
    os.close(inner)
    try:
        wait_until((state / "status.sock").exists, BOUND_S)
        yield process, terminal
    finally:
        process.kill()
        process.wait(BOUND_S)


@pytest.mark.parametrize("program", ["relay", "kubelet"])
def test_what_runs_in_a_terminal_ends_with_it(program: str, tmp_path: Path) -> None:
    command = command_of(program, tmp_path)
    with in_a_terminal(command, tmp_path) as (process, terminal):
        os.close(terminal)
        assert process.wait(BOUND_S) == 0
    assert not (tmp_path / "status.sock").exists()


@pytest.mark.parametrize("program", ["relay", "kubelet"])
def test_what_runs_under_nohup_goes_on(program: str, tmp_path: Path) -> None:
    command = ["nohup", *command_of(program, tmp_path)]
    with in_a_terminal(command, tmp_path) as (process, terminal):
        os.close(terminal)
        status = [*PYTHON, program, "status", "--json", "--state-dir", str(tmp_path)]
        assert subprocess.run(status, capture_output=True, timeout=BOUND_S, check=False).returncode in {0, 1}
        assert process.poll() is None
