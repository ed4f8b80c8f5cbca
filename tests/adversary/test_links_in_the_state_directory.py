"""Attacker: another user of the machine who can put something into a state directory while the operator, or
root, runs a command there. Tried: a link in the place of each file, so that the program reads, empties or
writes another file of its own user.

What must happen: the command ends with one line that names the file, and what is behind the link stays as it
was. That files of other users are refused too is tested with the opener (tests/schemas/test_files.py).
"""

import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from schemas.files import PRIVATE, make_private_directory, write_atomic
from tests.fakes.command_lines import CommandLines, Ended
from tests.fakes.ports import unused_port

BOUND_S = 60
SERVE = ["run", "--broker", "127.0.0.1:1", "--listen"]
FILES_OF_COMMANDS = {
    "ca/root.pem": ["ca", "list"],
    "ca/root.key": ["ca", "issue", "--mock", "1", "--out", "mocks"],
    "ca/ledger.jsonl": ["ca", "list"],
    "token.key": ["token", "issue", "--sub", "agent"],
    "token_keys.jsonl": ["token", "rotate-key"],
    "join_tokens.jsonl": ["join-token", "create"],
    "revoked_tokens.jsonl": ["token", "revoke", "x", "--foreign"],
    "node_names.jsonl": ["node", "list"],
}
# It takes seconds to start, and each of them is opened as it does.
FILES_OF_THE_RELAY = [
    "audit.lock",
    *(pytest.param(name, marks=pytest.mark.long) for name in ("audit.jsonl", "marks", "marks/marks.sqlite3")),
]
FILES_OF_THE_NODE = ("node_id", "node.key", "leaf.pem", "root.pem", "kubelet.json", "lock")
DAEMON = ["run", "--broker", "127.0.0.1:1", "--relay", "http://127.0.0.1:1", "--loopback-port", "0"]


def run(package: str, state: Path, arguments: list[str]) -> Ended:
    ran = subprocess.run(
        [sys.executable, "-P", "-m", package, *arguments, "--state-dir", str(state)],
        capture_output=True,
        text=True,
        timeout=BOUND_S,
        check=False,
        cwd=state.parent,
    )
    return Ended(ran.returncode, ran.stdout, ran.stderr)


@pytest.fixture(scope="module")
def states(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with a state directory of each program."""
    directory = tmp_path_factory.mktemp("states")
    for package, arguments in (("relay", ["ca", "init"]), ("kubelet", ["init"])):
        made = run(package, directory / package, arguments)
        assert made.code == 0, made
    return directory


@contextmanager
def nothing_goes_through(file: Path, victim: Path) -> Iterator[list[Ended]]:
    """Put a link to ``victim`` in the place of ``file``, and judge how the program in the list has ended."""
    if file.exists():
        file.rename(victim)
    else:
        make_private_directory(file.parent)
        write_atomic(victim, "of the program's own user\n", PRIVATE)
    before = victim.read_bytes()
    file.symlink_to(victim)
    programs: list[Ended] = []
    yield programs
    [ran] = programs
    assert ran.code == 3, ran
    assert str(file) in ran.err
    assert "Traceback" not in ran.err
    assert victim.read_bytes() == before
    assert file.is_symlink()


@pytest.fixture
def commands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> CommandLines:
    monkeypatch.chdir(tmp_path)
    return CommandLines(monkeypatch, capfd, {})


@pytest.mark.parametrize("name", FILES_OF_COMMANDS)
def test_a_command_reads_and_writes_nothing_through_a_link(
    states: Path, tmp_path: Path, commands: CommandLines, name: str
) -> None:
    state = shutil.copytree(states / "relay", tmp_path / "state")
    with nothing_goes_through(state / name, tmp_path / "victim") as programs:
        programs.append(commands.run("relay", *FILES_OF_COMMANDS[name], "--state-dir", str(state)))


@pytest.mark.parametrize("name", FILES_OF_THE_RELAY)
def test_the_relay_reads_and_writes_nothing_through_a_link(states: Path, tmp_path: Path, name: str) -> None:
    state = shutil.copytree(states / "relay", tmp_path / "state")
    port = unused_port()
    serve = [*SERVE, f"127.0.0.1:{port}", "--public-url", f"http://127.0.0.1:{port}"]
    with nothing_goes_through(state / name, tmp_path / "victim") as programs:
        programs.append(run("relay", state, serve))


@pytest.mark.parametrize("name", FILES_OF_THE_NODE)
def test_the_node_reads_and_writes_nothing_through_a_link(states: Path, tmp_path: Path, name: str) -> None:
    state = shutil.copytree(states / "kubelet", tmp_path / "state")
    with nothing_goes_through(state / name, tmp_path / "victim") as programs:
        programs.append(run("kubelet", state, DAEMON))
