"""What the operator sees of the state, kind by kind."""

import asyncio
import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from relay.cli.state import OlderRelayError, path_to_write
from relay.state.kinds import KINDS, NAME
from relay.state.names import NameLedger
from schemas.process.status_socket import served
from tests.fakes.clock import FakeClock
from tests.fakes.relay_command import RelayCommand
from tests.fakes.signer import NODE_ID, NOW_MS, OTHER_NODE_ID


def test_each_kind_is_shown_and_nothing_that_is_secret(relay: RelayCommand, state: Path) -> None:
    token = relay("join-token", "create", "--tenant", "acme").out.strip()
    key = json.loads((state / "join_tokens.jsonl").read_text())["key"]
    for kind in KINDS:
        shown = [relay("state", "show", kind.name, *options) for options in ((), ("--json",))]
        assert [outcome.code for outcome in shown] == [0, 0]
        assert not any(secret in outcome.out for outcome in shown for secret in (key, token))
        assert json.loads(shown[1].out)["rule"] == kind.rule
    (entry,) = json.loads(relay("state", "show", "join_token", "--json").out)["entries"]
    assert (entry["tenant"], entry["uses"]) == ("acme", 1)
    assert token.split(".")[1] == entry["id"]


def test_what_is_in_a_file_is_shown_printable(relay: RelayCommand, state: Path) -> None:
    (state / "node_names.jsonl").write_text('{"action":"name","label":"a\\u001b[2J\\u202e"}\n')
    outcome = relay("state", "show", "name")
    assert outcome.code == 0
    assert outcome.out.replace("\n", "").isprintable()
    assert outcome.out.isascii()


@pytest.mark.parametrize(
    ("kind", "code", "text"),
    [
        ("revocations", 2, "there is no kind of state revocations; the nearest is revocation"),
        ("name", 3, "damaged"),
    ],
    ids=["unknown", "damaged"],
)
def test_what_cannot_be_shown_is_named(
    relay: RelayCommand, state: Path, kind: str, code: int, text: str
) -> None:
    (state / "node_names.jsonl").write_text("[]\n")
    outcome = relay("state", "show", kind)
    assert (outcome.code, outcome.out) == (code, "")
    assert text in outcome.err


@pytest.mark.integration
@pytest.mark.parametrize("version", [None, "0.2.0", "998.9.1"])
async def test_what_a_relay_of_the_fleet_does_not_know_is_refused(state: Path, version: str | None) -> None:
    await asyncio.to_thread(state.mkdir, 0o700)
    new = replace(NAME, since="999.0")
    path_to_write(new, state)  # nothing runs: the relay keeps it back by itself
    newer = {"relay": "01HZX9K3M4P7Q8R9S0T1V2W3XA", "version": "999.0.1"}
    older = {"relay": "01HZX9K3M4P7Q8R9S0T1V2W3XB"} | ({} if version is None else {"version": version})
    async with served(state, lambda: {"cluster": {"others": [newer]}}):
        await asyncio.to_thread(path_to_write, new, state)
    async with served(state, lambda: {"cluster": {"others": [newer, older]}}):
        await asyncio.to_thread(path_to_write, NAME, state)
        with pytest.raises(OlderRelayError, match=r"XB of this fleet has version .*, and name needs 999\.0"):
            await asyncio.to_thread(path_to_write, new, state)


PROGRAM = Path(sys.executable).parent / "relay"
BASH = shutil.which("bash")


@pytest.fixture
def labelled(tmp_path: Path) -> Path:
    ledger = NameLedger(tmp_path / "state" / "node_names.jsonl", FakeClock(NOW_MS))
    ledger.ledger.path.parent.mkdir(mode=0o700)
    ledger.label(NODE_ID, "acme", "Gewächshaus Süd")
    ledger.label(OTHER_NODE_ID, "acme", "garage")
    return tmp_path / "state"


def completed(shell: str, labelled: Path, *words: str) -> list[str]:
    """Return what is offered for the last of ``words``."""
    line = " ".join(["relay", *words])
    asked = {
        "_RELAY_COMPLETE": f"complete_{shell}",
        "COMP_WORDS": line,
        "COMP_CWORD": str(len(words)),
        "_TYPER_COMPLETE_ARGS": line,
        "_TYPER_COMPLETE_FISH_ACTION": "get-args",
        "RELAY_STATE_DIR": str(labelled),
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


@pytest.mark.integration
def test_labels_are_completed_in_their_letters_and_from_ascii(labelled: Path) -> None:
    assert completed("fish", labelled, "node", "show", "g") == ["garage"]
    assert completed("fish", labelled, "ca", "revoke", "Gewac") == ["Gewachshaus Sud"]
    assert completed("bash", labelled, "node", "label", "Gew") == ["Gewächshaus\\ Süd"]


@pytest.mark.integration
def test_scopes_are_completed_and_a_state_that_cannot_be_read_offers_nothing(tmp_path: Path) -> None:
    found = completed("fish", tmp_path, "token", "issue", "--scope", "tools:call:r")
    assert found == ["tools:call:read_only", "tools:call:reversible"]
    assert completed("fish", tmp_path / "nothing", "node", "show", "g") == []
    (tmp_path / "node_names.jsonl").write_text("damage\n")
    assert completed("fish", tmp_path, "node", "show", "g") == []


@pytest.mark.integration
@pytest.mark.skipif(BASH is None, reason="there is no bash")
def test_bash_completes_a_label_with_the_script_of_the_packages(labelled: Path) -> None:
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
        env=os.environ | {"PATH": f"{PROGRAM.parent}:{os.environ['PATH']}", "RELAY_STATE_DIR": str(labelled)},
        check=True,
        capture_output=True,
        text=True,
    )
    assert done.stdout == "garage\n"
