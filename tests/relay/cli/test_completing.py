"""What a shell completes: commands, the labels of nodes, and scopes."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from relay.state.names import NameLedger
from tests.fakes.clock import FakeClock
from tests.fakes.signer import NODE_ID, NOW_MS, OTHER_NODE_ID

PROGRAM = Path(sys.executable).parent / "relay"
BASH = shutil.which("bash")

pytestmark = pytest.mark.integration


@pytest.fixture
def state(tmp_path: Path) -> Path:
    ledger = NameLedger(tmp_path / "state" / "node_names.jsonl", FakeClock(NOW_MS))
    ledger.ledger.path.parent.mkdir(mode=0o700)
    ledger.label(NODE_ID, "acme", "Gewächshaus Süd")
    ledger.label(OTHER_NODE_ID, "acme", "garage")
    return tmp_path / "state"


def completed(shell: str, state: Path, *words: str) -> list[str]:
    """Return what is offered for the last of ``words``."""
    line = " ".join(["relay", *words])
    asked = {
        "_RELAY_COMPLETE": f"complete_{shell}",
        "COMP_WORDS": line,
        "COMP_CWORD": str(len(words)),
        "_TYPER_COMPLETE_ARGS": line,
        "_TYPER_COMPLETE_FISH_ACTION": "get-args",
        "RELAY_STATE_DIR": str(state),
    }
    ran = subprocess.run(
        [
            sys.executable,
            "-P",
            "-c",
            "import sys; sys.argv = ['relay']; from relay.cli.entry import main; main()",
        ],
        env=os.environ | asked,
        check=False,
        capture_output=True,
        text=True,
    )
    assert ran.stderr == ""
    return ran.stdout.split("\n")[:-1] if ran.stdout.strip() else []


def test_labels_are_completed_in_their_letters_and_from_ascii(state: Path) -> None:
    assert completed("fish", state, "node", "show", "g") == ["garage"]
    assert completed("fish", state, "ca", "revoke", "Gewac") == ["Gewachshaus Sud"]
    assert completed("bash", state, "node", "label", "Gew") == ["Gewächshaus\\ Süd"]


def test_scopes_are_completed_and_a_state_that_cannot_be_read_offers_nothing(tmp_path: Path) -> None:
    found = completed("fish", tmp_path, "token", "issue", "--scope", "tools:call:r")
    assert found == ["tools:call:read_only", "tools:call:reversible"]
    assert completed("fish", tmp_path / "nothing", "node", "show", "g") == []
    (tmp_path / "node_names.jsonl").write_text("damage\n")
    assert completed("fish", tmp_path, "node", "show", "g") == []


@pytest.mark.skipif(BASH is None, reason="there is no bash")
def test_bash_completes_a_label_with_the_script_of_the_packages(state: Path) -> None:
    script = subprocess.run(
        [PROGRAM],
        env=os.environ | {"_RELAY_COMPLETE": "source_bash"},
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    asked = 'COMP_WORDS=(relay node show gar) COMP_CWORD=3; _relay_completion relay; echo "$COMPREPLY"'
    done = subprocess.run(
        [str(BASH), "-c", f"{script}\n{asked}"],
        env=os.environ | {"PATH": f"{PROGRAM.parent}:{os.environ['PATH']}", "RELAY_STATE_DIR": str(state)},
        check=True,
        capture_output=True,
        text=True,
    )
    assert done.stdout == "garage\n"
