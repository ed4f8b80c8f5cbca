"""``relay join-token``."""

import json
from hashlib import sha256
from pathlib import Path

import pytest

from schemas.addresses import PLAIN_OPTION
from schemas.enrolment import JoinToken
from schemas.identity import first_certificate_in
from tests.fakes.command_lines import mode
from tests.fakes.relay_command import RelayCommand as Relay


def joins(relay: Relay) -> list[dict[str, object]]:
    outcome = relay("join-token", "list", "--json")
    assert (outcome.code, outcome.err) == (0, "")
    found: list[dict[str, object]] = json.loads(outcome.out)
    return found


def test_join_token_create_prints_the_token_alone_and_says_besides_what_to_type(
    relay: Relay, state: Path
) -> None:
    outcome = relay(
        *("join-token", "create", "--tenant", "acme", "--ttl", "2h", "--uses", "3"),
        *("--public-url", "https://relay.example/"),
    )
    assert outcome.code == 0
    token = JoinToken.parse(outcome.out)
    assert outcome.out == token.text() + "\n"
    root = (state / "ca" / "root.pem").read_text()
    assert token.fingerprint == sha256(first_certificate_in(root)).digest()
    assert "  edge-kubelet enroll https://relay.example --token-file FILE\n" in outcome.err
    assert token.text() not in outcome.err
    assert mode(state / "join_tokens.jsonl") == 0o600
    [join] = joins(relay)
    assert (join["id"], join["tenant"], join["uses"], join["state"]) == (token.id, "acme", 3, "open")
    assert int(str(join["expires_at_ms"])) - int(str(join["created_ms"])) == 7_200_000


def test_a_join_token_is_for_one_node_and_an_hour_unless_told(relay: Relay) -> None:
    relay("join-token", "create")
    [join] = joins(relay)
    assert (join["tenant"], join["uses"]) == ("default", 1)
    assert int(str(join["expires_at_ms"])) - int(str(join["created_ms"])) == 3_600_000


def test_the_command_to_type_is_one_that_the_node_accepts(relay: Relay) -> None:
    plain = relay("join-token", "create", "--public-url", "http://192.0.2.1:8700")
    assert f"edge-kubelet enroll http://192.0.2.1:8700 {PLAIN_OPTION} --token-file FILE\n" in plain.err


def test_on_a_terminal_the_line_to_paste_on_the_node_is_printed(
    relay: Relay, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("relay.cli.join_tokens.is_terminal", lambda: True)
    outcome = relay("join-token", "create", "--public-url", "https://relay.example")
    variable, *command = outcome.out.split()
    token = JoinToken.parse(variable.removeprefix("EDGE_JOIN_TOKEN="))
    assert token.text() in outcome.out
    assert command == ["edge-kubelet", "enroll", "https://relay.example"]
    assert outcome.err.endswith("Paste this line on the node:\n")
    listed = relay("join-token", "create", "--public-url", "https://relay.example", "--json")
    facts = json.loads(listed.out)
    assert facts["line"] == f"EDGE_JOIN_TOKEN={facts['token']} edge-kubelet enroll https://relay.example"


def test_during_a_rotation_a_join_token_names_the_root_that_the_relay_still_shows(
    relay: Relay, state: Path
) -> None:
    old = (state / "ca" / "root.pem").read_text()
    relay("ca", "rotate-root")
    token = JoinToken.parse(relay("join-token", "create").out)
    assert token.fingerprint == sha256(first_certificate_in(old)).digest()


def test_join_token_list_shows_no_secret(relay: Relay) -> None:
    assert relay("join-token", "list").out.split()[0] == "ID"
    token = relay("join-token", "create", "--tenant", "acme").out.strip()
    _, join_id, secret, _ = token.split(".")
    for outcome in (relay("join-token", "list"), relay("join-token", "list", "--json")):
        assert join_id in outcome.out
        assert secret not in outcome.out
    assert relay("join-token", "list").out.splitlines()[1].split()[0:2] == [join_id, "acme"]
    assert relay("join-token", "list").out.splitlines()[1].split()[-2:] == ["0/1", "open"]


def test_join_token_revoke_makes_it_void(relay: Relay) -> None:
    join_id = relay("join-token", "create").out.split(".")[1]
    outcome = relay("join-token", "revoke", join_id)
    assert (outcome.code, outcome.out, outcome.err) == (0, "", f"revoked {join_id}\n")
    assert relay("join-token", "revoke", join_id).err == f"{join_id} was revoked before\n"
    assert joins(relay)[0]["state"] == "revoked"


def test_join_token_revoke_of_what_never_was_is_a_no(relay: Relay) -> None:
    outcome = relay("join-token", "revoke", "\x1b[31m")
    assert outcome.code == 1
    assert outcome.error.isprintable()


def test_a_join_token_of_another_machine_is_revoked_where_the_cas_key_is_not(
    bare: Relay, state: Path
) -> None:
    join_id = "01HZX9K3M4P7Q8R9S0T1V2W3XY"
    for before in ([], ["ca", "init"]):
        bare(*before)
        assert bare("join-token", "revoke", join_id).code == 1
    (state / "ca" / "root.key").unlink()
    outcome = bare("join-token", "revoke", join_id, "--json")
    assert json.loads(outcome.out) == {"id": join_id, "revoked_now": True}
    assert bare("join-token", "revoke", join_id).err == f"{join_id} was revoked before\n"
    another = bare("join-token", "revoke", join_id[::-1])
    assert "as soon as both are connected to NATS" in another.err
    assert bare("join-token", "revoke", "x").code == 1


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param(["--ttl", "31d"], id="too long"),
        pytest.param(["--ttl", "soon"], id="no time"),
        pytest.param(["--uses", "0"], id="no uses"),
        pytest.param(["--uses", "10001"], id="too many"),
        pytest.param(["--tenant", "Not A Tenant\x1b[31m"], id="no tenant"),
        pytest.param(["--tenant", "unenrolled"], id="the tenant of who has none"),
        pytest.param(["--public-url", "ftp://relay.example"], id="no URL of a relay"),
    ],
)
def test_a_join_token_that_cannot_be_is_a_wrong_command_line(
    relay: Relay, state: Path, arguments: list[str]
) -> None:
    outcome = relay("join-token", "create", *arguments)
    assert outcome.code == 2
    assert outcome.error.isprintable()
    assert not (state / "join_tokens.jsonl").exists()


@pytest.mark.parametrize("command", [["create"], ["list"], ["revoke", "x"]])
def test_join_tokens_that_others_can_read_are_not_used(relay: Relay, state: Path, command: list[str]) -> None:
    relay("join-token", "create")
    (state / "join_tokens.jsonl").chmod(0o644)
    outcome = relay("join-token", *command)
    assert outcome.code == 3
    assert f"chmod 600 {state / 'join_tokens.jsonl'}" in outcome.error
