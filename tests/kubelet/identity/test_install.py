import json
import subprocess
import sys
from pathlib import Path

import pytest

from relay.settings.environment import now_ms
from schemas.identity_files import IdentityFiles
from schemas.process.command_errors import EXIT_CANNOT_RUN
from tests.fakes.node import write_identity
from tests.fakes.signer import DAY_MS, SimulatedCa, SimulatedNode, key_named

pytestmark = pytest.mark.integration

NOW = now_ms()
CA = SimulatedCa("root of today", NOW)
NODE = CA.issue(now_ms=NOW)
FRESH = CA.issue(now_ms=NOW)
ROGUE = SimulatedCa("rogue", NOW)
BOUND_S = 60


@pytest.fixture
def files(tmp_path: Path) -> IdentityFiles:
    return write_identity(tmp_path / "state", NODE)


def run(directory: Path, said: str) -> subprocess.CompletedProcess[str]:
    """Run the process with ``said`` on its standard input."""
    command = [sys.executable, "-P", "-m", "kubelet.identity.install", str(directory)]
    return subprocess.run(command, input=said, capture_output=True, text=True, timeout=BOUND_S, check=False)


def issued(node: SimulatedNode, roots: str = CA.root_pem, **more: str) -> str:
    return json.dumps({"certificate": node.leaf_pem, "roots": roots, **more})


def test_a_leaf_that_is_believed_is_put_in_place_without_a_word(files: IdentityFiles) -> None:
    ended = run(files.root, issued(FRESH))
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")
    assert files.read().kid == FRESH.kid


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        pytest.param(issued(CA.issue(key=key_named("a thief"), now_ms=NOW)), "another key", id="key"),
        pytest.param(issued(CA.issue(now_ms=NOW - 100 * DAY_MS)), "validity", id="out of its time"),
        pytest.param(issued(ROGUE.issue(now_ms=NOW), CA.root_pem + ROGUE.root_pem), "endorsed", id="a rogue"),
        pytest.param(issued(FRESH, "x" * 20_000), "too large", id="too much"),
        pytest.param("{", "", id="no JSON"),
        pytest.param("", "", id="nothing"),
    ],
)
def test_whatever_else_it_is_one_line_says_why_and_nothing_changes(
    files: IdentityFiles, said: str, reason: str
) -> None:
    before = {path.name: path.read_bytes() for path in files.root.iterdir()}
    ended = run(files.root, said)
    assert ended.returncode == EXIT_CANNOT_RUN
    assert reason in ended.stderr
    assert ended.stderr.startswith("kubelet: ")
    assert ended.stderr.count("\n") == 1
    assert {path.name: path.read_bytes() for path in files.root.iterdir()} == before


def test_without_an_identity_there_is_nothing_to_renew(tmp_path: Path) -> None:
    ended = run(tmp_path, issued(FRESH))
    assert (ended.returncode, ended.stderr.count("\n")) == (EXIT_CANNOT_RUN, 1)
    assert "edge-kubelet init" in ended.stderr
