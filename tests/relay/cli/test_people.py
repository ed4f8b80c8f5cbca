"""``relay people``: who is invited, what is shown of them, and what ends."""

import json
import os
from pathlib import Path

import pytest

from relay.settings.config import StateFiles
from relay.settings.environment import now_ms
from relay.state.grants import Choice, Grant, Grants, grant_of
from relay.state.people import PeopleLedger, PersonRole
from relay.state.tokens import RevokedTokens
from tests.fakes.command_lines import mode
from tests.fakes.relay_command import RelayCommand as Relay

URL = "https://relay.example"
OIDC = """
["people.oidc"]
issuer = "https://{issuer}"
client_id = "edge-relay"
secret_file = "{secret}"
allow = ["groups=hub:member:default"]
"""


def given_to_ada(state: Path) -> Grant:
    """Return what ada, who has made a passkey, gave to a client."""
    files = StateFiles(state)
    ada = PeopleLedger(files.people, now_ms, bytes).read().named("ada")
    assert ada is not None
    members = {
        "id": "01HZX9K3M4P7Q8R9S0T1V2W3X4",
        "person": ada.id,
        "client_id": "c",
        "client_name": "It\x1b[31m",
    }
    members |= {
        "origin": "client.example",
        "redirect": "https://client.example/cb",
        "sub": "ada/client.example",
    }
    more = {"asserts": False, "remember": True, "asked": (), "made_ms": now_ms()}
    choice = Choice("default", ("tools:call:read_only",), None, None, now_ms() + 86_400_000)
    grants = Grants(files.grants, RevokedTokens(files.revoked_tokens), now_ms, bytes)
    end_ms = now_ms() + 3_600_000
    return grants.begin(
        grant_of(members | more, choice), lambda _: ("a-jti", end_ms), may=lambda: True, refreshes=True
    ).grant


def test_a_person_is_invited_by_a_link_that_nothing_keeps(relay: Relay, state: Path) -> None:
    made = relay("people", "invite", "ada", "--role", "operator", "--public-url", URL)
    assert made.code == 0, made.err
    link = made.out.strip()
    assert link.startswith(f"{URL}/invitation#")
    assert made.err.startswith("For ada, operator of tenant default; good once, until ")
    assert mode(state / "people.jsonl") == 0o600
    assert link.partition("#")[2] not in (state / "people.jsonl").read_text("ascii")
    listed = relay("people", "list").out.splitlines()
    assert listed[1].split() == ["ada", "operator", "default", "0", "passkeys", "invited"]
    again = json.loads(relay("people", "invite", "ada", "--role", "operator", "--json").out)
    assert again["link"] != link
    assert again["person"] == "ada"


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("<b>",), "is no name of a person"),
        (("ada lovelace",), "is no name of a person"),
        (("x" * 65,), "is no name of a person"),
        (("ada", "--tenant", "*"), "is no tenant"),
        (("ada", "--tenant", "A B"), "is no tenant"),
        (("ada", "--role", "king"), "king"),
        (("ada", "--public-url", "https://192.0.2.1"), "browsers make no passkey for https://192.0.2.1"),
        (("ada", "--public-url", "http://127.0.0.1:8700"), "http://localhost:PORT"),
    ],
)
def test_who_cannot_be_invited(relay: Relay, state: Path, arguments: tuple[str, ...], text: str) -> None:
    url = () if "--public-url" in arguments else ("--public-url", URL)
    refused = relay("people", "invite", *arguments, *url)
    assert refused.code in {2, 3}
    assert text in refused.err
    assert len(refused.err.splitlines()) == 1
    assert not (state / "people.jsonl").exists() or not (state / "people.jsonl").read_text()


def test_a_relay_that_was_told_of_no_sign_in_invites_no_one(
    relay: Relay, state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = state / "told.toml"
    file.write_text("sign_in = false\n")
    file.chmod(0o600)
    for told in ({"sign_in": "false"}, {"config": str(file)}, {}):
        (state / "run.json").write_text(json.dumps(told))
        if not told:
            monkeypatch.setenv("RELAY_SIGN_IN", "false")
        refused = relay("people", "invite", "ada", "--public-url", URL)
        assert (refused.code, "the setting sign_in is false" in refused.err) == (3, True)


def test_a_role_is_changed_by_a_new_invitation_after_a_revocation(relay: Relay) -> None:
    relay("people", "invite", "ada", "--public-url", URL)
    refused = relay("people", "invite", "ada", "--role", "operator")
    assert (refused.code, "revoke first" in refused.err) == (2, True)
    assert relay("people", "revoke", "ada").code == 0
    assert relay("people", "invite", "ada", "--role", "operator").code == 0
    # Who is known keeps the role where none is named.
    assert relay("people", "invite", "ada").code == 0
    assert relay("people", "list").out.splitlines()[-1].split()[:2] == ["ada", "operator"]


@pytest.mark.parametrize("command", ["show", "reset", "revoke"])
def test_who_is_not_known_is_named(relay: Relay, command: str) -> None:
    refused = relay("people", command, "bob\x1b", *(("--public-url", URL) if command == "reset" else ()))
    assert refused.code == 1
    assert refused.err == "relay: there is no 'bob\\x1b': see `relay people list`\n"


def test_what_a_client_was_given_is_shown_and_ends(relay: Relay, state: Path) -> None:
    relay("people", "invite", "ada", "--public-url", URL)
    grant = given_to_ada(state)
    shown = relay("people", "show", "ada").out
    assert "ada/client.example" in shown
    assert "\x1b" not in shown
    assert relay("people", "revoke", "ada", "--grant", "unknown").code == 1
    ended = relay("people", "revoke", "ada", "--grant", grant.id, "--json")
    assert json.loads(ended.out) == {"person": "ada", "grants": [grant.id]}
    assert "a-jti" in RevokedTokens(state / "revoked_tokens.jsonl").jtis()
    assert json.loads(relay("people", "show", "ada", "--json").out)["grants"] == []


def test_with_a_person_all_that_clients_were_given_ends(relay: Relay, state: Path) -> None:
    relay("people", "invite", "ada", "--public-url", URL)
    given_to_ada(state)
    assert relay("people", "revoke", "ada").err == "revoked ada; ended for clients: 1 grant\n"
    assert "a-jti" in RevokedTokens(state / "revoked_tokens.jsonl").jtis()
    assert relay("people", "list").out.splitlines()[1].split()[-1] == "revoked"


def test_who_signs_in_at_a_provider_is_active_while_the_settings_name_it(relay: Relay, state: Path) -> None:
    PeopleLedger(state / "people.jsonl", now_ms, os.urandom, "https://id.example").admit(
        "a-subject", "ada", PersonRole.MEMBER, "default"
    )
    secret, file = state / "oidc.secret", state / "told.toml"
    secret.write_text("s" * 32)
    secret.chmod(0o600)
    (state / "run.json").write_text(json.dumps({"config": str(file)}))
    for issuer, said in (("id.example", "active"), ("other.example", "ended"), (None, "ended")):
        file.write_text("" if issuer is None else OIDC.format(issuer=issuer, secret=secret))
        file.chmod(0o600)
        listed = relay("people", "list").out.splitlines()[1].split()
        assert listed == ["ada", "member", "default", "https://id.example", said]
        assert relay("people", "show", "ada").out.startswith(f"ada: member of tenant default, {said}, ")


def test_without_a_relay_there_is_nobody(bare: Relay) -> None:
    refused = bare("people", "list")
    assert refused.code == 3
    assert "relay ca init" in refused.err


def test_on_a_relay_without_the_cas_key_people_are_listed_and_revoked_and_not_invited(
    relay: Relay, state: Path
) -> None:
    assert relay("people", "invite", "ada", "--public-url", URL).code == 0
    (state / "ca" / "root.key").unlink()
    (state / "token.key").unlink(missing_ok=True)
    for refused in (
        relay("people", "invite", "bob", "--public-url", URL),
        relay("people", "reset", "ada", "--public-url", URL),
        relay("people", "show", "ada"),
        relay("people", "revoke", "ada", "--grant", "one"),
    ):
        assert refused.code == 3, refused.err
        assert refused.err.splitlines() == [
            "relay: people sign in by the relay with the CA's key: give this command there"
        ]
    assert relay("people", "list").out.splitlines()[1].split() == ["ada", "member", "default", "-", "-"]
    (ada,) = json.loads(relay("people", "list", "--json").out)
    assert (ada["passkeys"], ada["state"]) == (None, None)
    assert relay("people", "revoke", "ada").code == 0
    assert relay("people", "list").out.splitlines()[1].split() == ["ada", "member", "default", "-", "revoked"]


def test_nobody_is_invited_in_a_fleet_that_is_not_sealed(
    relay: Relay, state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    status = {"cluster": {"sealed": False, "others": []}}
    monkeypatch.setattr("relay.cli.people.read_status", lambda _root: status)
    refused = relay("people", "invite", "ada", "--public-url", URL)
    assert refused.code == 3
    assert "run `relay cluster seal` first" in refused.err
    assert not (state / "people.jsonl").exists()
    status["cluster"]["sealed"] = True
    assert relay("people", "invite", "ada", "--public-url", URL).code == 0
