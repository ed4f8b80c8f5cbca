"""`relay run`, typed once with options and once without."""

import json
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.fakes.polling import wait_until
from tests.fakes.ports import unused_port

BOUND_S = 60
RELAY = (sys.executable, "-P", "-m", "relay")

pytestmark = pytest.mark.integration


@contextmanager
def running(state: Path, port: int, *options: str) -> Iterator[Path]:
    """Run the relay until it listens at ``port``; give the file of what it prints."""
    printed = state.parent / "printed"
    command = [*RELAY, "run", "--state-dir", str(state), *options]
    with printed.open("wb") as file, subprocess.Popen(command, stderr=file) as process:
        try:
            wait_until(lambda: process.poll() is not None or is_open(port), BOUND_S)
            yield printed
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(BOUND_S)


def is_open(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


@pytest.mark.long
def test_a_bare_second_run_does_what_the_first_was_told(tmp_path: Path) -> None:
    state, port, other = tmp_path / "relay", unused_port(), unused_port()
    subprocess.run([*RELAY, "ca", "init", "--state-dir", str(state)], check=True, capture_output=True)
    told = ("--listen", f"127.0.0.1:{port}", "--no-broker", "--envelope", "shadow", "--agent-rps", "7")
    with running(state, port, *told):
        assert is_open(port)
    with running(state, port) as printed:
        assert is_open(port)
        command = [*RELAY, "config", "show", "--json", "--state-dir", str(state)]
        shown = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
        assert {name: shown[name]["value"] for name in ("no_broker", "envelope", "agent_rps")} == {
            "no_broker": True,
            "envelope": "shadow",
            "agent_rps": 7,
        }
        assert "not as it was told" not in printed.read_text()
    with running(state, other, "--listen", f"127.0.0.1:{other}") as printed:
        assert is_open(other)
    assert f"relay: not as it was told before: --listen was 127.0.0.1:{port}\n" in printed.read_text()
