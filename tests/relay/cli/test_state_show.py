"""What the operator sees of the state, kind by kind."""

import json
from pathlib import Path

import pytest

from relay.state.kinds import KINDS
from tests.fakes.relay_command import RelayCommand


def test_each_kind_is_shown_and_nothing_that_is_secret(relay: RelayCommand, state: Path) -> None:
    relay("ca", "init")
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
    relay("ca", "init")
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
    relay("ca", "init")
    (state / "node_names.jsonl").write_text("[]\n")
    outcome = relay("state", "show", kind)
    assert (outcome.code, outcome.out) == (code, "")
    assert text in outcome.err
