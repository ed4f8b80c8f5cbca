import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.node import write_identity
from tests.fakes.signer import SimulatedNode

BOUND_S = 20
WHERE = 'relay = "http://127.0.0.1:9"\nbroker = "127.0.0.1:9"\nloopback_port = 0\n'

pytestmark = pytest.mark.integration


class Daemon:
    """A daemon in a process of its own, with a file of settings."""

    def __init__(self, process: subprocess.Popen[str], file: Path) -> None:
        self.process = process
        self._file = file

    def lines_until(self, event: str) -> list[dict[str, Any]]:
        """Return the lines of the log up to the next one of ``event``."""
        assert self.process.stderr is not None
        found = []
        for text in self.process.stderr:
            found.append(json.loads(text))
            if found[-1]["event"] == event:
                return found
        raise AssertionError(f"the daemon ended before {event!r}: {found}")

    def reload(self, settings: str, where: str = WHERE) -> None:
        """Write a file, and ask the daemon to read it."""
        self._file.write_text(where + settings)
        self.process.send_signal(signal.SIGHUP)


@pytest.fixture
def daemon(tmp_path: Path, node_of_today: SimulatedNode) -> Iterator[Daemon]:
    write_identity(tmp_path / "state", node_of_today)
    file = tmp_path / "kubelet.toml"
    file.write_text(WHERE)
    file.chmod(0o600)
    command = [sys.executable, "-P", "-m", "kubelet", "run", "--config", str(file)]
    with subprocess.Popen(
        [*command, "--state-dir", str(tmp_path / "state")], stderr=subprocess.PIPE, text=True
    ) as process:
        running = Daemon(process, file)
        running.lines_until("kubelet started")
        yield running
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=BOUND_S)
        assert process.returncode == 0


def settings_in(lines: list[dict[str, Any]], event: str) -> list[str]:
    return [line["setting"] for line in lines if line["event"] == event]


def test_what_reloads_is_applied_and_what_does_not_is_named(daemon: Daemon) -> None:
    daemon.reload('ttl = "1h"\nheartbeat = "5m"\nsocket = "/nowhere"\n')
    lines = daemon.lines_until("settings read again")
    assert settings_in(lines, "setting reloaded") == ["heartbeat", "ttl"]
    assert settings_in(lines, "setting needs a restart") == ["socket"]
    daemon.reload("")
    lines = daemon.lines_until("settings read again")
    assert settings_in(lines, "setting reloaded") == ["heartbeat", "ttl"]
    assert settings_in(lines, "setting needs a restart") == []


def test_another_list_of_relays_needs_a_restart_and_is_named(daemon: Daemon) -> None:
    relays = WHERE.replace('"http://127.0.0.1:9"', '["http://127.0.0.1:9", "http://127.0.0.1:10"]')
    daemon.reload('ttl = "1h"\n', relays)
    lines = daemon.lines_until("settings read again")
    assert settings_in(lines, "setting reloaded") == ["ttl"]
    assert settings_in(lines, "setting needs a restart") == ["relay"]


def test_a_broken_file_changes_nothing_and_says_so(daemon: Daemon) -> None:
    daemon.reload('ttl = "1h"\ntll = 1\n')
    problems = daemon.lines_until("settings not reloaded")[-1]["problems"]
    assert len(problems) == 1
    assert "there is no setting tll; the nearest is ttl" in problems[0]
    daemon.reload('ttl = "90s"\n')  # less than two heartbeats
    assert "two heartbeats" in daemon.lines_until("settings not reloaded")[-1]["problems"][0]
    daemon.reload("")
    assert daemon.lines_until("settings read again")[-1]["changed"] == 0


def test_the_log_level_is_lowered_and_raised_again(daemon: Daemon) -> None:
    daemon.reload('log_level = "warning"\nsocket = "/nowhere"\n')
    lines = daemon.lines_until("setting needs a restart")
    assert settings_in(lines, "setting reloaded") == []
    daemon.reload("")
    assert settings_in(daemon.lines_until("settings read again"), "setting reloaded") == ["log_level"]
