"""Attacker: another user of the machine who can put something into a state directory while the operator, or
root, runs a command there. Tried: a link in the place of each file, so that the program reads, empties or
writes another file of its own user.

What must happen: the command ends with one line that names the file, and what is behind the link stays as it
was. That files of other users are refused too is tested with the opener (tests/schemas/test_files.py).
"""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from schemas.files import PRIVATE, make_private_directory, write_atomic
from tests.fakes.ports import unused_port

BOUND_S = 60
SERVE = ["run", "--broker", "127.0.0.1:1", "--listen"]
FILES_OF_THE_RELAY = {
    "ca/root.pem": ["ca", "list"],
    "ca/root.key": ["ca", "issue", "--mock", "1", "--out", "mocks"],
    "ca/ledger.jsonl": ["ca", "list"],
    "token.key": ["token", "issue", "--sub", "agent"],
    "token_keys.jsonl": ["token", "rotate-key"],
    "join_tokens.jsonl": ["join-token", "create"],
    "revoked_tokens.jsonl": ["token", "revoke", "x", "--foreign"],
    "node_names.jsonl": ["node", "list"],
    "marks": SERVE,
    "marks/marks.sqlite3": SERVE,
    "audit.jsonl": SERVE,
    "audit.lock": SERVE,
}
FILES_OF_THE_NODE = ("node_id", "node.key", "leaf.pem", "root.pem", "kubelet.json", "lock")
DAEMON = ["run", "--broker", "127.0.0.1:1", "--relay", "http://127.0.0.1:1", "--loopback-port", "0"]


def run(package: str, state: Path, arguments: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-P", "-m", package, *arguments, "--state-dir", str(state)],
        capture_output=True,
        text=True,
        timeout=BOUND_S,
        check=False,
        cwd=state.parent,
    )


@pytest.fixture(scope="module")
def states(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with a state directory of each program."""
    directory = tmp_path_factory.mktemp("states")
    for package, arguments in (("relay", ["ca", "init"]), ("kubelet", ["init"])):
        made = run(package, directory / package, arguments)
        assert made.returncode == 0, made.stderr
    return directory


def check_nothing_goes_through(package: str, state: Path, name: str, arguments: list[str]) -> None:
    file, victim = state / name, state.parent / "victim"
    if file.exists():
        file.rename(victim)
    else:
        make_private_directory(file.parent)
        write_atomic(victim, "of the program's own user\n", PRIVATE)
    before = victim.read_bytes()
    file.symlink_to(victim)
    ran = run(package, state, arguments)
    assert ran.returncode == 3, ran.stderr
    assert str(file) in ran.stderr
    assert "Traceback" not in ran.stderr
    assert victim.read_bytes() == before
    assert file.is_symlink()


@pytest.mark.parametrize("name", FILES_OF_THE_RELAY)
def test_the_relay_reads_and_writes_nothing_through_a_link(states: Path, tmp_path: Path, name: str) -> None:
    state = shutil.copytree(states / "relay", tmp_path / "state")
    arguments = FILES_OF_THE_RELAY[name]
    if arguments is SERVE:
        port = unused_port()
        arguments = [*SERVE, f"127.0.0.1:{port}", "--public-url", f"http://127.0.0.1:{port}"]
    check_nothing_goes_through("relay", state, name, arguments)


@pytest.mark.parametrize("name", FILES_OF_THE_NODE)
def test_the_node_reads_and_writes_nothing_through_a_link(states: Path, tmp_path: Path, name: str) -> None:
    state = shutil.copytree(states / "kubelet", tmp_path / "state")
    check_nothing_goes_through("kubelet", state, name, DAEMON)
