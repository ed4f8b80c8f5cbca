"""``relay node``: labels, tags, and which nodes there are."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from relay.cli.options import narrowed
from schemas.certificates import make_csr
from schemas.labels import columns_of
from tests.fakes.relay_command import Outcome, RelayCommand
from tests.fakes.signer import key_named

FIRST = "01hzx9k3m4p7q8r9s0t1v2w3xy"
SECOND = "01hzx9k3m4p7q8r9s0t1v2w3xz"
FOREIGN = "01jzx9k3m4p7q8r9s0t1v2w3xy"
EMPTY = "no label"


@pytest.fixture
def _three(relay: RelayCommand, tmp_path: Path) -> None:
    """Issue certificates for two nodes of one tenant, and for one of another."""
    for node_id, tenant in ((FIRST, "acme"), (SECOND, "acme"), (FOREIGN, "globex")):
        issue(relay, tmp_path, node_id, "--tenant", tenant)


def issue(relay: RelayCommand, directory: Path, node_id: str, *options: str) -> None:
    csr = directory / "node.csr"
    csr.write_text(make_csr(key_named(node_id), node_id))
    assert relay("ca", "issue", csr, "-o", directory / "leaf.pem", *options).code == 0


def listed(relay: RelayCommand, *options: str) -> dict[str, dict[str, Any]]:
    outcome = relay("node", "list", "--json", *options)
    assert outcome.code == 0
    return {node["node_id"]: node for node in json.loads(outcome.out)}


def done(outcome: Outcome) -> str:
    """Return what a command has said that did what it was to do, and has no result."""
    assert (outcome.code, outcome.out) == (0, "")
    return outcome.err


pytestmark = pytest.mark.usefixtures("_three")


@pytest.mark.parametrize("reference", [FIRST, FIRST.upper(), FIRST[:-1] + "y"])
def test_a_node_is_labelled_and_found_by_its_label(relay: RelayCommand, reference: str) -> None:
    assert (
        done(relay("node", "label", reference, "greenhouse pi")) == f"{FIRST} of tenant acme: greenhouse pi\n"
    )
    assert listed(relay)[FIRST]["label"] == "greenhouse pi"
    done(relay("node", "label", "Greenhouse PI", "barn"))
    assert listed(relay)[FIRST]["label"] == "barn"
    assert EMPTY in done(relay("node", "label", "barn", "--remove"))
    assert listed(relay)[FIRST]["label"] is None


def test_a_label_beyond_ascii_is_shown_with_what_is_typed_for_it(relay: RelayCommand) -> None:
    assert done(relay("node", "label", FIRST, "Gewa\u0308chshaus")) == (
        f"{FIRST} of tenant acme: Gewächshaus (Gewachshaus)\n"
    )
    assert listed(relay)[FIRST]["label"] == "Gewächshaus"
    assert listed(relay)[FIRST]["label_ascii"] == "Gewachshaus"
    assert "  Gewächshaus (Gewachshaus)  " in relay("node", "list").out
    for reference in ("gewachshaus", "GEWÄCHSHAUS", "xn--Gewchshaus-s5a"):
        assert "label   Gewächshaus (Gewachshaus)\n" in relay("node", "show", reference).out
    assert "looks like, the label of" in relay("node", "label", SECOND, "Gewachshaus").error
    assert "looks like, the label of" in relay("join-token", "create", "--label", "gewachshaus").error
    relay("node", "label", SECOND, "温室の北")
    lines = relay("node", "list").out.splitlines()
    assert len({columns_of(line[: line.index("in force")]) for line in lines[1:]}) == 1


@pytest.mark.integration
def test_a_terminal_that_lacks_a_letter_is_shown_an_escape(relay: RelayCommand, tmp_path: Path) -> None:
    relay("node", "label", FIRST, "Łódź")
    ran = subprocess.run(
        [sys.executable, "-P", "-m", "relay", "node", "list", "--state-dir", tmp_path / "state"],
        env={**os.environ, "PYTHONIOENCODING": "iso-8859-1"},
        capture_output=True,
        check=True,
    )
    assert b"\\u0141\xf3d\\u017a (Lodz)" in ran.stdout


def test_a_node_is_found_by_the_beginning_of_its_id_if_no_other_begins_so(relay: RelayCommand) -> None:
    done(relay("node", "label", FOREIGN[:6], "pump"))
    assert listed(relay)[FOREIGN]["label"] == "pump"
    outcome = relay("node", "label", FIRST[:8], "pump")
    assert outcome.code == 1
    assert "fits 2 nodes" in outcome.error


def test_tags_are_set_replaced_and_removed_by_their_keys(relay: RelayCommand) -> None:
    assert "gateway site=north" in done(relay("node", "tag", FIRST, "site=north", "gateway"))
    assert "gateway site=south" in done(relay("node", "tag", FIRST, "site=south"))
    assert "no tags" in done(relay("node", "tag", FIRST, "--remove", "site", "--remove", "gateway"))
    assert listed(relay)[FIRST]["tags"] == []


def test_a_label_that_is_taken_in_the_tenant_is_a_no_that_names_its_node(relay: RelayCommand) -> None:
    relay("node", "label", FIRST, "pi")
    outcome = relay("node", "label", SECOND, "Pi")
    assert outcome.code == 1
    assert FIRST in outcome.error
    assert relay("node", "label", FOREIGN, "pi").code == 0


def test_what_fits_nodes_of_two_tenants_is_refused(relay: RelayCommand) -> None:
    for node_id in (FIRST, FOREIGN):
        relay("node", "label", node_id, "pi")
    outcome = relay("node", "show", "pi")
    assert outcome.code == 1
    assert f"fits {FIRST} of tenant acme and {FOREIGN} of tenant globex: give the id" in outcome.error


def test_what_is_no_node_is_a_no_with_close_names(relay: RelayCommand) -> None:
    relay("node", "label", FIRST, "greenhouse pi")
    outcome = relay("node", "show", "greenhose pi")
    assert outcome.code == 1
    assert "close: greenhouse pi" in outcome.error
    assert relay("node", "show", "\x1b[31m").error.isprintable()


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        pytest.param(["label", FIRST], "give a label, or --remove", id="no label"),
        pytest.param(["label", FIRST, "pi", "--remove"], "give a label, or --remove", id="both"),
        pytest.param(["label", FIRST, "site=north"], "is no label", id="a tag as a label"),
        pytest.param(["label", FIRST, "\x1b[31mpi"], "is no label", id="control characters"),
        pytest.param(["label", FIRST, "01hzx9"], "read as an id", id="an id as a label"),
        pytest.param(["tag", FIRST], "give tags, or --remove", id="no tag"),
        pytest.param(["tag", FIRST, "North"], "is no tag", id="a tag in capitals"),
        pytest.param(["tag", FIRST, *(f"t{n}" for n in range(17))], "at most 16", id="too many tags"),
    ],
)
def test_a_name_that_cannot_be_is_a_wrong_command_line(
    relay: RelayCommand, state: Path, arguments: list[str], word: str
) -> None:
    outcome = relay("node", *arguments)
    assert outcome.code == 2
    assert word in outcome.error
    assert outcome.error.isprintable()
    assert not (state / "node_names.jsonl").exists() or not (state / "node_names.jsonl").stat().st_size


def test_the_table_shows_every_node_and_the_state_of_its_certificate(relay: RelayCommand) -> None:
    relay("node", "label", FIRST, "greenhouse pi")
    relay("node", "tag", FIRST, "site=north", "gateway")
    relay("ca", "revoke", FOREIGN)
    header, *rows = relay("node", "list").out.splitlines()
    assert header.split()[:4] == ["NODE", "TENANT", "LABEL", "TAGS"]
    assert len({line.find("acme") for line in rows[:2]}) == 1
    assert "greenhouse pi" in rows[0]
    assert "gateway site=north" in rows[0]
    assert ["in force" in row for row in rows] == [True, True, False]
    assert "revoked" in rows[2]
    assert set(listed(relay, "--tenant", "acme")) == {FIRST, SECOND}


def test_show_has_a_nodes_names_and_certificates(relay: RelayCommand, tmp_path: Path) -> None:
    relay("node", "label", FIRST, "pi")
    issue(relay, tmp_path, FIRST, "--replace")
    shown = json.loads(relay("node", "show", "pi", "--json").out)
    assert (shown["node_id"], shown["tenant"], shown["label"]) == (FIRST, "acme", "pi")
    assert [leaf["state"] for leaf in shown["certificates"]] == ["revoked", "in force"]
    table = relay("node", "show", "pi").out
    assert all(word in table for word in (FIRST, "acme", "pi", "revoked", "in force"))


def test_a_node_that_is_not_revoked_is_not_forgotten(relay: RelayCommand) -> None:
    relay("node", "label", FIRST, "pi")
    outcome = relay("node", "forget", "pi")
    assert outcome.code == 1
    assert f"relay ca revoke {FIRST}" in outcome.error
    assert listed(relay)[FIRST]["label"] == "pi"


def test_a_revoked_node_is_forgotten_with_its_names_until_it_is_issued_to_again(
    relay: RelayCommand, tmp_path: Path
) -> None:
    relay("node", "label", FIRST, "pi")
    relay("node", "tag", FIRST, "gateway")
    relay("ca", "revoke", "pi")
    assert done(relay("node", "forget", "pi")) == f"forgotten {FIRST}\n"
    for command in (("label", FIRST, "barn"), ("tag", FIRST, "gateway")):
        refused = relay("node", *command)
        assert (refused.code, "was forgotten" in refused.error) == (1, True)
    assert set(listed(relay)) == {SECOND, FOREIGN}
    assert relay("node", "label", SECOND, "pi").code == 0
    issue(relay, tmp_path, FIRST, "--replace")
    assert (listed(relay)[FIRST]["label"], listed(relay)[FIRST]["tags"]) == (None, [])


@pytest.mark.parametrize("reference", ["greenhouse pi", FIRST[:-1] + "Y", FOREIGN[:7]])
def test_a_certificate_is_revoked_by_its_nodes_label_or_the_beginning_of_its_id(
    relay: RelayCommand, reference: str
) -> None:
    relay("node", "label", FIRST, "greenhouse pi")
    outcome = relay("ca", "revoke", reference)
    assert outcome.code == 0
    assert len(outcome.out.split()) == 1


def test_a_damaged_ledger_of_names_does_not_prevent_a_revocation_by_id(
    relay: RelayCommand, state: Path
) -> None:
    (state / "node_names.jsonl").write_text("no entry\n")
    outcome = relay("ca", "revoke", "pi")
    assert outcome.code == 3
    assert "node_names.jsonl is damaged" in outcome.error
    assert relay("ca", "revoke", FIRST).code == 0


# --- join tokens ----------------------------------------------------------------------------------------


def test_a_join_token_shows_the_names_that_it_gives(relay: RelayCommand) -> None:
    token = relay(
        "join-token", "create", "--tenant", "acme", "--label", "shed", "--tag", "site=north", "--tag", "new"
    )
    assert token.code == 0
    [shown] = json.loads(relay("join-token", "list", "--json").out)
    assert (shown["label"], shown["tags"]) == ("shed", ["site=north", "new"])
    row = relay("join-token", "list").out.splitlines()[1]
    assert "shed" in row
    assert "site=north new" in row


@pytest.mark.parametrize(
    ("arguments", "code", "word"),
    [
        pytest.param(["--label", "pi"], 1, FIRST, id="a node has the label"),
        pytest.param(["--label", "Shed"], 2, "gives the label", id="a token gives the label"),
        pytest.param(["--label", "new", "--uses", "2"], 2, "one use", id="a label for two"),
        pytest.param(["--label", "a*"], 2, "is no label", id="no label"),
        pytest.param(["--tag", "A"], 2, "is no tag", id="no tag"),
        pytest.param(["--tag", "a=b", "--tag", "a=c"], 2, "same key", id="two values"),
    ],
)
def test_a_join_token_does_not_promise_names_that_it_cannot_give(
    relay: RelayCommand, arguments: list[str], code: int, word: str
) -> None:
    relay("node", "label", FIRST, "pi")
    relay("join-token", "create", "--tenant", "acme", "--label", "shed")
    outcome = relay("join-token", "create", "--tenant", "acme", *arguments)
    assert outcome.code == code
    assert word in outcome.error
    assert len(json.loads(relay("join-token", "list", "--json").out)) == 1


def test_the_label_of_a_revoked_join_token_and_of_another_tenants_is_free(relay: RelayCommand) -> None:
    join_id = relay("join-token", "create", "--tenant", "acme", "--label", "shed").out.split(".")[1]
    assert relay("join-token", "create", "--tenant", "globex", "--label", "shed").code == 0
    relay("join-token", "revoke", join_id)
    assert relay("join-token", "create", "--tenant", "acme", "--label", "shed").code == 0


def test_a_table_fits_a_terminal_without_cutting_an_id() -> None:
    assert narrowed([26, 8, 20, 90], 120) == [26, 8, 20, 60]
    assert narrowed([26, 8, 48, 90], 80) == [26, 8, 26, 26]
    assert narrowed([26, 8, 20], 120) == [26, 8, 20]
