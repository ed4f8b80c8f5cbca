"""``relay token``: tokens of agents, and the settings that commands keep."""

import json
import os
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest

from relay.cli.demo.local_system import issue_token
from relay.pki.authority import CertificateAuthority
from relay.settings.config import StateFiles
from relay.state.key_files import read_key
from relay.state.tokens import RevokedTokens, TokenKeys, key_id
from schemas.files import PRIVATE, write_atomic
from schemas.keys import from_base64url
from schemas.registry import SchemaRegistry
from schemas.tokens import AGENT_REF, TokenVerifier
from tests.fakes.clock import FakeClock
from tests.fakes.command_lines import RUN, mode, written_ms
from tests.fakes.demo import plan_below
from tests.fakes.relay_command import FREE_PORT, Outcome
from tests.fakes.relay_command import RelayCommand as Relay
from tests.fakes.signer import NOW_MS


def test_token_issue_prints_the_token_alone_and_says_besides_by_what_it_can_be_revoked(
    relay: Relay, state: Path, registry: SchemaRegistry
) -> None:
    outcome = relay(
        *("token", "issue", "--sub", "agent-1", "--tenant", "acme", "--ttl", "2h"),
        *("--scope", "tools:call:read_only", "--scope", "sessions:message"),
        *("--public-url", "https://relay.example/"),
    )
    assert outcome.code == 0
    token = outcome.out.removesuffix("\n")
    assert token.count(".") == 2
    assert mode(state / "token.key") == 0o600
    public_key = bytes(read_key(state / "token.key").verify_key)
    claims = TokenVerifier(registry, AGENT_REF).verify(
        token,
        {key_id(public_key): public_key}.get,
        audiences=frozenset({"https://relay.example/mcp"}),
        now_s=written_ms(state / "token.key") // 1000,
    )
    assert (claims["iss"], claims["sub"], claims["tenant"]) == ("https://relay.example", "agent-1", "acme")
    assert claims["scope"] == "tools:call:read_only sessions:message"
    assert claims["exp"] - claims["iat"] == 7200
    until = datetime.fromtimestamp(claims["exp"], UTC).strftime("%Y-%m-%d %H:%M")
    facts = f"agent-1 of tenant acme, for https://relay.example/mcp, until {until} UTC"
    assert outcome.err == f"jti {claims['jti']}: {facts}\n"


@pytest.mark.parametrize("command", [["issue", "--sub", "agent-1"], ["list"], ["revoke", "a-jti"]])
def test_no_command_for_tokens_makes_a_key(bare: Relay, state: Path, command: list[str]) -> None:
    outcome = bare("token", *command)
    assert outcome.code == 3
    assert "--state-dir" in outcome.error
    assert not state.exists()


def test_the_tokens_that_were_issued_are_listed_with_their_state(relay: Relay) -> None:
    kept, revoked = (jti_of(relay("token", "issue", "--sub", name)) for name in ("agent-1", "agent-2"))
    relay("token", "revoke", revoked)
    listed = relay("token", "list", "--json")
    assert {each["jti"]: (each["sub"], each["state"]) for each in json.loads(listed.out)} == {
        kept: ("agent-1", "valid"),
        revoked: ("agent-2", "revoked"),
    }
    header, *rows = relay("token", "list").out.splitlines()
    assert header.split()[0] == "JTI"
    assert [row.split()[0] for row in rows] == [kept, revoked]


def test_a_token_is_issued_for_some_kinds_and_nodes_and_listed_so(relay: Relay) -> None:
    issued = relay(
        *("token", "issue", "--sub", "agent-1", "--tenant", "acme", "--public-url", "https://relay.example"),
        *("--kinds", "system.*,linux.*", "--kinds", "linux.journal", "--json"),
        *("--nodes", "tag:greenhouse, !Gewächshaus"),
    )
    claims = json.loads(from_base64url(json.loads(issued.out)["token"].split(".")[1]))
    assert claims["kinds"] == ["system.*", "linux.*", "linux.journal"]
    assert claims["nodes"] == ["tag:greenhouse", "!xn--Gewchshaus-s5a"]
    narrowed = (
        "kinds:system.* kinds:linux.* kinds:linux.journal nodes:tag:greenhouse nodes:!xn--Gewchshaus-s5a"
    )
    assert narrowed in relay("token", "list").out


def test_the_token_of_a_demo_is_listed(bare: Relay, state: Path) -> None:
    plan = replace(plan_below(state.parent), state=StateFiles(state))
    payload = issue_token(plan, "demo-agent").split(".")[1]
    (listed,) = json.loads(bare("token", "list", "--json").out)
    assert (listed["sub"], listed["state"]) == ("demo-agent", "valid")
    assert listed["jti"] == json.loads(from_base64url(payload))["jti"]


def test_an_issued_token_is_never_kept(relay: Relay, state: Path) -> None:
    token = relay("token", "issue", "--sub", "agent-1").out.strip()
    signature = token.rsplit(".", 1)[1]
    assert not [
        path for path in state.rglob("*") if path.is_file() and signature in path.read_text("latin-1")
    ]
    assert mode(state / "issued_tokens.jsonl") == 0o600


def test_what_a_command_was_given_first_later_commands_need_not_be_given(relay: Relay) -> None:
    relay("join-token", "create", "--tenant", "acme", "--public-url", "https://relay.example")
    issued = relay("token", "issue", "--sub", "agent-1")
    assert "tenant acme, for https://relay.example/mcp" in issued.err
    other = relay(
        "token", "issue", "--sub", "agent-1", "--tenant", "beta", "--public-url", "https://b.example"
    )
    assert "tenant beta, for https://b.example/mcp" in other.err
    assert "tenant acme, for https://relay.example/mcp" in relay("token", "issue", "--sub", "agent-1").err


def test_what_was_refused_is_not_kept(relay: Relay, state: Path) -> None:
    relay("token", "issue", "--sub", "agent-1", "--tenant", "Not A Tenant")
    assert not (state / "settings.json").exists()


@pytest.mark.integration
def test_nothing_is_kept_where_there_is_no_relay(bare: Relay, state: Path) -> None:
    assert bare(*RUN).code == 3
    assert not state.exists()


@pytest.mark.integration
def test_a_relay_that_finds_no_broker_names_the_three_ways_out(
    relay: Relay, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("relay.broker.nats_server._DISTRIBUTION", "no-such-distribution")
    outcome = relay("run", "--listen", f"127.0.0.1:{FREE_PORT}")
    assert outcome.code == 3
    # The line about a broker's port is not always there; the error is the last.
    error = outcome.err.splitlines()[-1]
    assert error.startswith("relay: no broker: nats-server is not on PATH")
    for way in ("the extra 'broker' (docs/install.md)", "--broker", "--no-broker"):
        assert way in error


def jti_of(issued: Outcome) -> str:
    return issued.err.removeprefix("jti ").partition(":")[0]


def test_a_token_allows_reading_for_thirty_days_and_nothing_more_unless_told(relay: Relay) -> None:
    claims = json.loads(from_base64url(relay("token", "issue", "--sub", "agent-1").out.split(".")[1]))
    assert claims["scope"] == "tools:call:read_only"
    assert claims["exp"] - claims["iat"] == 30 * 86_400


def test_a_token_is_revoked_by_its_jti_once_and_for_all(relay: Relay, state: Path) -> None:
    jti = jti_of(relay("token", "issue", "--sub", "agent-1"))
    for _ in range(2):
        outcome = relay("token", "revoke", jti)
        assert (outcome.code, outcome.out, outcome.err) == (0, "", f"revoked {jti}\n")
    unknown = relay("token", "revoke", "a foreign/jti=")
    assert unknown.code == 1
    assert "--foreign" in unknown.error
    relay("token", "revoke", "a foreign/jti=", "--foreign")
    file = state / "revoked_tokens.jsonl"
    assert RevokedTokens(file).jtis() == {jti, "a foreign/jti="}
    assert len(file.read_text().splitlines()) == 2
    assert mode(file) == 0o600


@pytest.mark.parametrize("jti", ["", "a\n", "caf\xe9", "\x1b[31m", "x" * 129])
def test_what_is_no_jti_is_a_wrong_command_line(relay: Relay, state: Path, jti: str) -> None:
    outcome = relay("token", "revoke", jti)
    assert outcome.code == 2
    assert outcome.error.isprintable()
    assert not (state / "revoked_tokens.jsonl").exists()


def test_a_new_key_signs_tokens_and_those_by_the_old_one_are_accepted_until_its_end(
    relay: Relay, state: Path
) -> None:
    old = read_key(state / "token.key")
    before = written_ms(state / "token.key")
    too_long = relay("token", "rotate-key", "--overlap", "366d")
    assert (too_long.code, "--overlap must be within 365 days" in too_long.error) == (2, True)
    rotated = relay("token", "rotate-key", "--overlap", "2d", "--json")
    facts = json.loads(rotated.out)
    new = read_key(state / "token.key")
    assert mode(state / "token.key") == mode(state / "token_keys.jsonl") == 0o600
    kids = [key_id(bytes(key.verify_key)) for key in (old, new)]
    assert facts == {"kid": kids[1], "old_keys_until_ms": facts["old_keys_until_ms"]}
    assert facts["old_keys_until_ms"] >= before + 2 * 86_400_000
    accepted = token_keys(state).accepted()
    assert {kid: key.until_ms for kid, key in accepted.items()} == {
        kids[0]: facts["old_keys_until_ms"],
        kids[1]: None,
    }
    header = relay("token", "issue", "--sub", "agent-1").out.split(".")[0]
    assert json.loads(from_base64url(header))["kid"] == kids[1]


def test_the_key_of_a_relay_that_never_ran_ends_too_when_it_is_replaced(relay: Relay, state: Path) -> None:
    (state / "token_keys.jsonl").unlink()
    old = key_id(bytes(read_key(state / "token.key").verify_key))
    outcome = relay("token", "rotate-key")
    assert "tokens by older keys are accepted until" in outcome.err
    assert "make a backup now" in outcome.err
    until_ms = token_keys(state).accepted()[old].until_ms
    assert until_ms is not None


def test_a_key_that_was_replaced_signs_no_token(relay: Relay, state: Path) -> None:
    old = (state / "token.key").read_text()
    relay("token", "rotate-key")
    write_atomic(state / "token.key", old, PRIVATE)  # as from a backup
    outcome = relay("token", "issue", "--sub", "agent-1")
    assert (outcome.code, outcome.out) == (3, "")
    assert "relay token rotate-key" in outcome.error


def test_without_the_keys_tokens_are_issued_elsewhere_and_revoked_here(relay: Relay, state: Path) -> None:
    for file in (*(state / "ca").glob("*.key"), state / "token.key"):
        file.unlink()
    issued, rotated = relay("token", "issue", "--sub", "agent-1"), relay("token", "rotate-key")
    assert (issued.code, rotated.code) == (3, 3)
    assert "issue them on the relay with the CA's key" in issued.error
    assert "replace the key on the relay that has it" in rotated.error
    assert not (state / "token.key").exists()
    assert relay("token", "revoke", "a-jti", "--foreign").code == 0
    assert relay("token", "list").code == 0


def token_keys(state: Path) -> TokenKeys:
    files, clock = StateFiles(state), FakeClock(NOW_MS)
    return TokenKeys(files.token_keys, CertificateAuthority(files.ca, clock, os.urandom), clock)


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        pytest.param(["--scope", "root\x1b[31m"], "root\\x1b[31m", id="no such scope"),
        pytest.param(["--ttl", "1w"], "1w", id="no duration"),
        pytest.param(["--ttl", "0s"], "0s", id="no time at all"),
        pytest.param(["--ttl", "366d"], "--ttl must be within 365 days", id="more than a year"),
        pytest.param(["--ttl", "-1s"], "-1s", id="time that has passed"),
        pytest.param(["--tenant", "Not A Tenant"], "--tenant must match the pattern", id="no tenant"),
        pytest.param(
            ["--sub", ""], "--sub must have at least 1 character, for example my-agent", id="no subject"
        ),
        pytest.param(["--sub", "x" * 129], "--sub must have at most 128 characters", id="a long subject"),
        pytest.param(["--nodes", ""], "--nodes must match the pattern", id="no pattern of nodes"),
        pytest.param(["--nodes", "a\tb"], "for example 'tag:greenhouse'", id="control characters"),
        pytest.param(["--nodes", "!tag:a,!tag:b"], "--nodes only excludes", id="nodes for nothing"),
        pytest.param(["--kinds", "linux.nope..x"], "--kinds has 'linux.nope..x', which is", id="two dots"),
        pytest.param(["--kinds", "*,!linux"], "--kinds has '!linux', which is", id="one word"),
        pytest.param(["--kinds", "linux.*."], "the name of no kind, for example", id="a dot at the end"),
        pytest.param(["--kinds", "a.b.c.d.e*"], "the name of no kind", id="too many words"),
        pytest.param(["--kinds", "!linux.*"], "--kinds only excludes", id="kinds for nothing"),
        pytest.param(["--nodes", "a" * 99], "--nodes must have at most 80 characters", id="a long pattern"),
        pytest.param(["--public-url", "ftp://relay.example"], "ftp://relay.example", id="no URL of a relay"),
        pytest.param(["--public-url", "https://u:p@relay.example"], "relay.example", id="credentials"),
    ],
)
def test_a_token_that_cannot_be_is_a_wrong_command_line(
    relay: Relay, arguments: list[str], word: str
) -> None:
    outcome = relay("token", "issue", "--sub", "agent-1", *arguments)
    assert outcome.code == 2
    assert word in outcome.error
    assert outcome.error.isprintable()
