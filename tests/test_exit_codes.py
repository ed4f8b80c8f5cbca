"""The exit code of both programs where what was typed is wrong: 2, whatever the state of the machine."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.integration

WRONG = [
    "kubelet kind new X",
    "kubelet kind new system.clock",
    "kubelet kind new sys.echo",
    "kubelet doctor --explain nothing",
    "kubelet enroll nowhere --token x",
    "relay doctor --explain nothing",
    "relay ca issue --mock 1 --out {directory}/mocks --tenant A.B",
    "relay ca issue-server *.example --out {directory}/tls",
    "relay ca backup {directory}/backup --recipient age1no",
    "relay connect claude-code --url https://relay.example --name a.b",
    "relay join-token create --tenant A.B",
    "relay tools --url https://relay.example --kinds X",
    "relay token issue --sub a --ttl soon",
]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the state of a relay."""
    place = tmp_path_factory.mktemp("exit")
    assert run(place, "relay", "ca", "init").returncode == 0
    return place


def run(directory: Path, *command: str) -> subprocess.CompletedProcess[str]:
    settings = {"RELAY_STATE_DIR": f"{directory}/relay", "KUBELET_STATE_DIR": f"{directory}/kubelet"}
    others = {name: text for name, text in os.environ.items() if not name.startswith(("RELAY_", "KUBELET_"))}
    plain = {**others, "HOME": str(directory), "RELAY_CONFIG": "", "KUBELET_CONFIG": ""}
    return subprocess.run(
        [sys.executable, "-P", "-m", *command],
        env={**plain, **settings},
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.mark.parametrize("command", WRONG)
def test_a_wrong_command_line_is_told_apart_from_a_state_in_which_nothing_can_run(
    directory: Path, command: str
) -> None:
    ended = run(directory, *command.format(directory=directory).split())
    assert (ended.returncode, ended.stdout) == (2, ""), ended
    assert ended.stderr.count("\n") == 1, ended.stderr
