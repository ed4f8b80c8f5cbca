"""The exit code of both programs where what was typed is wrong: 2, whatever the state of the machine.

And of Ctrl-C before a program has loaded what says how it ends.
"""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.fakes.command_lines import CommandLines

WRONG = [
    "kubelet kind allow-device teapot",
    "kubelet kind new X",
    "kubelet kind new system.clock",
    "kubelet kind new sys.echo",
    "kubelet doctor --explain nothing",
    "kubelet enroll nowhere --token x",
    "relay doctor --explain nothing",
    "relay ca issue --mock 1 --out {directory}/mocks --tenant A.B",
    "relay ca issue-server *.example --out {directory}/tls",
    "relay ca issue-reader A.B --out {directory}/reader",
    "relay ca backup {directory}/backup --recipient age1no",
    "relay connect claude-code --url https://relay.example --name a.b",
    "relay join-token create --tenant A.B",
    "relay tools --url https://relay.example --kinds X",
    "relay token issue --sub a --ttl soon",
]


@pytest.fixture
def commands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> CommandLines:
    """Both programs, with state directories below the test's own, where the relay has a CA."""
    settings = {"RELAY_STATE_DIR": f"{tmp_path}/relay", "KUBELET_STATE_DIR": f"{tmp_path}/kubelet"}
    both = CommandLines(monkeypatch, capfd, {**settings, "HOME": str(tmp_path)})
    assert both.run("relay", "ca", "init").code == 0
    return both


@pytest.mark.parametrize("command", WRONG)
def test_a_wrong_command_line_is_told_apart_from_a_state_in_which_nothing_can_run(
    commands: CommandLines, tmp_path: Path, command: str
) -> None:
    program, *arguments = command.format(directory=tmp_path).split()
    ended = commands.run(program, *arguments)
    assert (ended.code, ended.out) == (2, ""), ended
    assert ended.err.count("\n") == 1, ended.err


@pytest.mark.parametrize("program", ["kubelet", "relay"])
@pytest.mark.parametrize(("command", "code"), [("status", 3), ("doctor --explain keys", 0), ("--version", 0)])
def test_without_a_standard_output_a_command_ends_as_with_one(
    commands: CommandLines, monkeypatch: pytest.MonkeyPatch, program: str, command: str, code: int
) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    ended = commands.run(program, *command.split())
    sys.stdout.close()
    assert (ended.code, ended.out, ended.err.count("\n")) == (code, "", int(code > 0)), ended


@pytest.mark.parametrize(
    ("command", "code"),
    [
        ("kubelet verify -", 1),
        ("kubelet retire", 1),
        ("relay call x --stdin", 2),
        ("relay login http://127.0.0.1:1", 2),
        ("relay ca backup {directory}/backup", 2),
    ],
)
def test_without_a_standard_input_a_command_has_no_answer_and_says_so(
    commands: CommandLines, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, command: str, code: int
) -> None:
    monkeypatch.delenv("EDGE_TOKEN", raising=False)
    assert commands.run("kubelet", "init").code == 0
    monkeypatch.setenv("KUBELET_RELAY", "http://127.0.0.1:1")
    monkeypatch.setenv("KUBELET_NO_BROKER", "true")
    monkeypatch.setattr(sys, "stdin", None)
    program, *arguments = command.format(directory=tmp_path).split()
    ended = commands.run(program, *arguments)
    sys.stdin.close()
    assert (ended.code, ended.out.strip(), ended.err.count("Traceback")) == (code, "", 0), ended


INTERRUPTED = """
import runpy
import sys
program, module = sys.argv[1:3]
class CtrlC:
    def find_spec(self, name, path=None, target=None):
        if name == module:
            raise KeyboardInterrupt
sys.meta_path.insert(0, CtrlC())
del sys.argv[1:3]
runpy.run_module(program, run_name="__main__", alter_sys=True)
"""


@pytest.mark.integration
@pytest.mark.parametrize(
    ("program", "module"),
    [
        ("kubelet", "kubelet.cli.commands"),
        ("kubelet", "typer"),
        ("kubelet", "schemas.process.command_errors"),
        ("kubelet", "kubelet.cli.doctor"),
        ("kubelet.daemon", "kubelet.config"),
        ("relay", "relay.cli.exits"),
        ("relay", "schemas.process.command_errors"),
        ("relay", "typer"),
        ("relay", "relay.cli.doctor"),
        ("relay.cli.server_process", "relay.server.serving"),
    ],
)
def test_ctrl_c_while_a_program_is_loaded_ends_it_without_a_traceback(program: str, module: str) -> None:
    argument = "[{},null,null]" if "." in program else "doctor"
    done = subprocess.run(
        [sys.executable, "-P", "-c", INTERRUPTED, program, module, argument],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")
