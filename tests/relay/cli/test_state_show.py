"""What the operator sees of the state, kind by kind."""

import asyncio
import json
from dataclasses import replace
from pathlib import Path

import pytest

from relay.cli.state import OlderRelayError, check_known
from relay.state.kinds import KINDS, NAME
from schemas.process.status_socket import served
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


@pytest.mark.integration
@pytest.mark.parametrize("version", [None, "0.2.0", "998.9.1"])
async def test_what_a_relay_of_the_fleet_does_not_know_is_refused(state: Path, version: str | None) -> None:
    await asyncio.to_thread(state.mkdir, 0o700)
    new = replace(NAME, since="999.0")
    check_known(new, state)  # nothing runs: the relay keeps it back by itself
    newer = {"relay": "01HZX9K3M4P7Q8R9S0T1V2W3XA", "version": "999.0.1"}
    older = {"relay": "01HZX9K3M4P7Q8R9S0T1V2W3XB"} | ({} if version is None else {"version": version})
    async with served(state, lambda: {"cluster": {"others": [newer]}}):
        await asyncio.to_thread(check_known, new, state)
    async with served(state, lambda: {"cluster": {"others": [newer, older]}}):
        await asyncio.to_thread(check_known, NAME, state)
        with pytest.raises(OlderRelayError, match=r"XB of this fleet has version .*, and name needs 999\.0"):
            await asyncio.to_thread(check_known, new, state)
