"""Completion answers for the programs, in the shells that people use."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

BOUND_S = 60
BIN = Path(sys.executable).parent

pytestmark = pytest.mark.integration


def completed(program: str, words: str, index: int) -> list[str]:
    """Return what the shell would offer for the word ``index`` of ``words``."""
    environment = {
        **os.environ,
        f"_{program.upper()}_COMPLETE": "complete_bash",
        "COMP_WORDS": words,
        "COMP_CWORD": str(index),
    }
    done = subprocess.run(
        [BIN / program], capture_output=True, text=True, timeout=BOUND_S, check=False, env=environment
    )
    return done.stdout.split()


def test_commands_are_completed_from_their_beginning() -> None:
    assert completed("relay", "relay to", 1) == ["token", "tools"]
    assert completed("relay", "relay token ", 2) == ["issue", "list", "revoke", "rotate-key"]
    assert completed("kubelet", "kubelet re", 1) == ["retire"]


def test_options_are_completed_from_their_beginning() -> None:
    assert completed("relay", "relay token issue --st", 3) == ["--state-dir"]
    assert completed("kubelet", "kubelet run --heart", 2) == ["--heartbeat"]


@pytest.mark.parametrize("program", ["relay", "kubelet"])
@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_script_of_a_shell_is_printed_for_it(program: str, shell: str) -> None:
    environment = {**os.environ, f"_{program.upper()}_COMPLETE": f"source_{shell}"}
    done = subprocess.run(
        [BIN / program], capture_output=True, text=True, timeout=BOUND_S, check=False, env=environment
    )
    assert f"_{program.upper()}_COMPLETE=complete_{shell}" in done.stdout


def test_bash_itself_offers_what_the_program_answers() -> None:
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("bash is not installed")
    script = """
eval "$(_RELAY_COMPLETE=source_bash relay)"
function=$(complete -p relay | sed 's/.*-F \\([^ ]*\\).*/\\1/')
COMP_WORDS=(relay config s) COMP_CWORD=2
"$function" relay
printf '%s\\n' "${COMPREPLY[@]}"
"""
    done = subprocess.run(
        [bash, "--norc", "-c", script],
        capture_output=True,
        text=True,
        timeout=BOUND_S,
        check=False,
        env={**os.environ, "PATH": f"{BIN}:{os.environ['PATH']}"},
    )
    assert done.stdout.split() == ["show"], done.stderr
