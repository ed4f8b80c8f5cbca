import asyncio
import json
import os
import signal
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path

import pyrage  # type: ignore[import-untyped]  # the library brings no types
import pytest

from relay.auth.agent_tokens import key_id
from relay.auth.revoked_tokens import RevokedTokens
from relay.auth.token_keys import TokenKeys
from relay.cli.entry import main
from relay.config import StateFiles, View
from relay.demo.local_system import issue_token
from relay.http.listener import bind
from relay.key_files import read_key
from relay.pki.authority import CertificateAuthority
from schemas.addresses import PLAIN_OPTION, HostPort
from schemas.certificates import make_csr, verify_leaf
from schemas.endorsement import is_server_root
from schemas.enrolment import JoinToken
from schemas.files import PRIVATE, make_private_directory, write_atomic
from schemas.identity import certificates_in
from schemas.identity_files import IdentityFiles
from schemas.keys import from_base64url
from schemas.registry import SchemaRegistry
from schemas.tokens import AGENT_REF, TokenVerifier
from tests.fakes.audits import WrittenAudit
from tests.fakes.clock import FakeClock
from tests.fakes.demo import plan_below
from tests.fakes.homeless import without_home
from tests.fakes.relay_command import FREE_PORT, Outcome
from tests.fakes.relay_command import RelayCommand as Relay
from tests.fakes.signer import NODE_ID, NOW_MS, key_named

CSR = make_csr(key_named("the node"), NODE_ID)


@pytest.fixture
def csr(tmp_path: Path) -> Path:
    path = tmp_path / "node.csr"
    path.write_text(CSR)
    return path


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def now_ms(path: Path) -> int:
    return path.stat().st_mtime_ns // 1_000_000


# --- the authority ------------------------------------------------------------------------------------


def test_ca_init_makes_a_root_and_prints_where_it_lies(relay: Relay, state: Path) -> None:
    outcome = relay("ca", "init")
    assert (outcome.code, outcome.out, outcome.err) == (
        0,
        f"{state}/ca/root.pem\n{state}/ca/server-root.pem\n",
        "",
    )
    assert mode(state / "ca" / "root.key") == 0o600
    assert mode(state / "ca") == 0o700
    assert mode(state) == 0o700


def test_ca_init_a_second_time_changes_nothing(relay: Relay, state: Path) -> None:
    relay("ca", "init")
    before = (state / "ca" / "root.pem").read_bytes()
    outcome = relay("ca", "init")
    assert outcome.code == 3
    assert "holds a CA already" in outcome.error
    assert (state / "ca" / "root.pem").read_bytes() == before


def test_ca_init_makes_the_root_of_servers_of_a_ca_that_has_none(relay: Relay, state: Path) -> None:
    relay("ca", "init")
    before = (state / "ca" / "root.pem").read_bytes()
    for file in (state / "ca").glob("server-*"):
        file.unlink()
    assert relay("ca", "init").code == 0
    assert (state / "ca" / "root.pem").read_bytes() == before
    assert (state / "ca" / "server-root.pem").exists()
    assert mode(state / "ca" / "server-root.key") == 0o600
    assert relay("ca", "init").code == 3


def test_ca_roots_shows_both_kinds_for_people_programs_and_files(relay: Relay) -> None:
    relay("ca", "init")
    relay("ca", "rotate-root")
    relay("ca", "rotate-root", "--servers")
    pem = relay("ca", "roots", "--pem").out
    kinds = [is_server_root(der) for der in certificates_in(pem)]
    assert kinds == [False, False, True, True]
    assert certificates_in(relay("ca", "roots", "--servers", "--pem").out) == certificates_in(pem)[2:]
    listed = json.loads(relay("ca", "roots", "--json").out)
    assert [root["of"] for root in listed] == ["nodes", "nodes", "servers", "servers"]
    assert [root["kid"] for root in listed] == [sha256(der).hexdigest() for der in certificates_in(pem)]
    table = relay("ca", "roots").out
    assert all(root["kid"][:16] in table for root in listed)


def test_ca_rotate_root_rotates_the_one_that_is_named(relay: Relay, state: Path) -> None:
    relay("ca", "init")
    nodes, servers = ((state / "ca" / name).read_text() for name in ("root.pem", "server-root.pem"))
    outcome = relay("ca", "rotate-root", "--servers", "--overlap", "30d")
    assert (outcome.code, outcome.out) == (0, f"{state}/ca/server-root.pem\n")
    assert "relay ca roots --servers --pem" in outcome.err
    assert (state / "ca" / "root.pem").read_text() == nodes
    assert servers in (state / "ca" / "server-previous.pem").read_text()
    assert "still trusted" in relay("ca", "rotate-root", "--servers").error


def test_ca_issue_prints_the_leaf_and_nothing_else(relay: Relay, state: Path, csr: Path) -> None:
    relay("ca", "init")
    outcome = relay("ca", "issue", csr, "--tenant", "acme")
    assert (outcome.code, outcome.err) == (0, "")
    root = state / "ca" / "root.pem"
    identity = verify_leaf(outcome.out, [root.read_text()], now_ms(root))
    assert (identity.node_id, identity.tenant) == (NODE_ID, "acme")


def test_ca_issue_writes_the_leaf_where_it_is_told(relay: Relay, csr: Path, tmp_path: Path) -> None:
    relay("ca", "init")
    outcome = relay("ca", "issue", csr, "-o", tmp_path / "leaf.pem")
    assert (outcome.code, outcome.out) == (0, "")
    assert "relay ca roots --pem" in outcome.err
    assert (tmp_path / "leaf.pem").read_text().startswith("-----BEGIN CERTIFICATE-----")


def test_ca_issue_leaves_the_place_of_the_leaf_as_it_was_if_it_fails(
    relay: Relay, csr: Path, tmp_path: Path
) -> None:
    leaf, older = tmp_path / "leaf.pem", tmp_path / "older.pem"
    older.write_text("older")
    relay("ca", "init")
    csr.write_text("no request")
    for output in (leaf, older):
        assert relay("ca", "issue", csr, "-o", output).code == 3
        assert relay("ca", "issue", tmp_path / "missing.csr", "-o", output).code == 3
    assert not leaf.exists()
    assert older.read_text() == "older"


def test_ca_issue_replaces_only_when_it_is_told(relay: Relay, csr: Path) -> None:
    relay("ca", "init")
    assert relay("ca", "issue", csr).code == 0
    refused = relay("ca", "issue", csr)
    assert refused.code == 3
    assert "--replace" in refused.error
    assert relay("ca", "issue", csr, "--replace").code == 0


def test_ca_issue_replaces_within_the_tenant_unless_another_is_named(relay: Relay, csr: Path) -> None:
    relay("ca", "init")
    for arguments in (["--tenant", "acme"], ["--replace"], ["--replace", "--tenant", "globex"]):
        assert relay("ca", "issue", csr, *arguments).code == 0
    assert [leaf["tenant"] for leaf in listed(relay)] == ["acme", "acme", "globex"]


def test_ca_issue_mock_makes_whole_identities(relay: Relay, tmp_path: Path) -> None:
    relay("ca", "init")
    outcome = relay("ca", "issue", "--mock", "2", "--out", tmp_path / "mocks")
    assert (outcome.code, outcome.out) == (0, "")
    directories = sorted((tmp_path / "mocks").iterdir())
    assert [IdentityFiles(directory).read().node_id for directory in directories] == [
        directory.name for directory in directories
    ]
    assert len(directories) == 2


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(b"", id="empty"),
        pytest.param(b"garbage", id="garbage"),
        pytest.param(b"\x30\x82\xff\xfe\x00", id="DER instead of PEM"),
        pytest.param(CSR.encode().replace(b"M", b"N", 1), id="damaged"),
    ],
)
def test_a_request_that_is_none_is_an_error_of_one_line(relay: Relay, csr: Path, content: bytes) -> None:
    relay("ca", "init")
    csr.write_bytes(content)
    outcome = relay("ca", "issue", csr)
    assert outcome.code == 3
    assert "not_a_request" in outcome.error


def listed(relay: Relay) -> list[dict[str, object]]:
    outcome = relay("ca", "list", "--json")
    assert (outcome.code, outcome.err) == (0, "")
    found: list[dict[str, object]] = json.loads(outcome.out)
    return found


def test_ca_list_shows_what_was_issued_and_what_became_of_it(relay: Relay, csr: Path, tmp_path: Path) -> None:
    relay("ca", "init")
    assert relay("ca", "list").out.split() == [
        "NODE",
        "OR",
        "SERVER",
        "TENANT",
        "KID",
        "ISSUED",
        "(UTC)",
        "EXPIRES",
        "(UTC)",
        "STATE",
    ]
    relay("ca", "issue", csr, "--tenant", "acme")
    relay("ca", "issue", csr, "--tenant", "acme", "--replace")
    relay("ca", "issue-server", "mqtt.example", "--out", tmp_path / "broker")
    first, second, server = listed(relay)
    assert (first["node_id"], first["tenant"], first["state"]) == (NODE_ID, "acme", "revoked")
    assert (second["node_id"], second["tenant"], second["state"]) == (NODE_ID, "acme", "in force")
    assert (server["name"], server["state"]) == ("mqtt.example", "in force")
    lines = relay("ca", "list").out.splitlines()
    kids = [str(each["kid"])[:16] for each in (first, second, server)]
    assert [line.split()[:3] for line in lines[1:]] == [
        [NODE_ID, "acme", kids[0]],
        [NODE_ID, "acme", kids[1]],
        ["mqtt.example", "-", kids[2]],
    ]
    assert len({line.index(kid) for line, kid in zip(lines[1:], kids, strict=True)}) == 1
    assert [line.endswith("revoked") for line in lines[1:]] == [True, False, False]


def test_ca_revoke_prints_the_kids_that_are_void_from_now_on(relay: Relay, csr: Path) -> None:
    relay("ca", "init")
    relay("ca", "issue", csr)
    [leaf] = listed(relay)
    outcome = relay("ca", "revoke", NODE_ID)
    assert (outcome.code, outcome.out, outcome.err) == (0, f"{leaf['kid']}\n", "")
    again = relay("ca", "revoke", NODE_ID)
    assert (again.code, again.out) == (0, "")
    assert "was revoked before" in again.err
    relay("ca", "issue", csr, "--replace")
    kid = str(listed(relay)[1]["kid"])
    assert relay("ca", "revoke", kid[:16]).out == f"{kid}\n"


def test_ca_revoke_takes_an_id_and_a_kid_in_capitals(relay: Relay, csr: Path) -> None:
    relay("ca", "init")
    relay("ca", "issue", csr)
    [leaf] = listed(relay)
    assert relay("ca", "revoke", NODE_ID.upper()).out == f"{leaf['kid']}\n"
    relay("ca", "issue", csr, "--replace")
    kid = str(listed(relay)[1]["kid"])
    assert relay("ca", "revoke", kid.upper()).out == f"{kid}\n"


@pytest.mark.parametrize("target", ["unknown", NODE_ID, "0" * 64, "\x1b[31m"])
def test_ca_revoke_of_what_never_was_is_a_no(relay: Relay, target: str) -> None:
    relay("ca", "init")
    outcome = relay("ca", "revoke", target)
    assert outcome.code == 1
    assert "relay ca list" in outcome.error
    assert outcome.error.isprintable()


def test_ca_rotate_root_says_until_when_the_old_root_is_trusted(relay: Relay, state: Path) -> None:
    relay("ca", "init")
    before = (state / "ca" / "root.pem").read_text()
    outcome = relay("ca", "rotate-root", "--overlap", "30d")
    assert (outcome.code, outcome.out) == (0, f"{state}/ca/root.pem\n")
    assert "UTC" in outcome.err
    assert (state / "ca" / "root.pem").read_text() != before
    assert before in (state / "ca" / "previous.pem").read_text()
    again = relay("ca", "rotate-root")
    assert again.code == 3
    assert "still trusted" in again.error


@pytest.mark.parametrize("overlap", ["12h", "0d", "3651d", "36h", "forever"])
def test_an_overlap_that_cannot_be_is_a_wrong_command_line(relay: Relay, state: Path, overlap: str) -> None:
    relay("ca", "init")
    outcome = relay("ca", "rotate-root", "--overlap", overlap)
    assert outcome.code == 2
    assert "90d" in outcome.error or "30d" in outcome.error
    assert not (state / "ca" / "previous.pem").exists()


def backup_key(tmp_path: Path) -> tuple[Path, str]:
    """Return an identity file as age-keygen writes it, and its recipient."""
    identity = pyrage.x25519.Identity.generate()
    file = tmp_path / "identity"
    write_atomic(file, f"# public key: {identity.to_public()}\n{identity}\n", PRIVATE)
    return file, str(identity.to_public())


def test_a_backup_is_encrypted_and_restored_into_an_empty_directory(
    relay: Relay, state: Path, tmp_path: Path
) -> None:
    relay("ca", "init")
    identity, recipient = backup_key(tmp_path)
    made = relay("ca", "backup", tmp_path / "backup", "--recipient", recipient)
    assert (made.code, made.out) == (0, "")
    assert mode(tmp_path / "backup") == 0o600
    assert b"PRIVATE KEY" not in (tmp_path / "backup").read_bytes()
    state.rename(tmp_path / "lost")
    restored = relay("ca", "restore", tmp_path / "backup", "--identity", identity)
    assert (restored.code, restored.out) == (0, "")
    assert "revoked since" in restored.err
    for name in ("root.pem", "root.key", "ledger.jsonl"):
        assert (state / "ca" / name).read_bytes() == (tmp_path / "lost" / "ca" / name).read_bytes()
    again = relay("ca", "restore", tmp_path / "backup", "--identity", identity)
    assert again.code == 3
    assert "is not empty" in again.error


# Each costs two derivations of a key, seconds and a gigabyte by design.
@pytest.mark.parametrize(
    "ways",
    [
        pytest.param(("file", "environment"), id="file-environment"),
        pytest.param(("environment", "file"), id="environment-file", marks=pytest.mark.long),
    ],
)
@pytest.mark.integration
def test_a_passphrase_is_read_from_where_others_cannot_see_it(
    relay: Relay, state: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ways: tuple[str, str]
) -> None:
    def options(way: str) -> list[str | Path]:
        if way == "file":
            monkeypatch.delenv("EDGE_BACKUP_PASSPHRASE", raising=False)
            return ["--passphrase-file", tmp_path / "passphrase"]
        monkeypatch.setenv("EDGE_BACKUP_PASSPHRASE", "correct horse")
        return []

    backup, restore = ways
    relay("ca", "init")
    write_atomic(tmp_path / "passphrase", "correct horse\n", PRIVATE)
    assert relay("ca", "backup", tmp_path / "backup", *options(backup)).code == 0
    assert b"PRIVATE KEY" not in (tmp_path / "backup").read_bytes()
    state.rename(tmp_path / "lost")
    assert relay("ca", "restore", tmp_path / "backup", *options(restore)).code == 0
    assert (state / "ca" / "root.key").exists()


def test_a_backup_is_plain_only_when_it_is_told_and_then_says_so(
    relay: Relay, state: Path, tmp_path: Path
) -> None:
    relay("ca", "init")
    refused = relay("ca", "backup", tmp_path / "backup")
    assert refused.code == 2
    assert "passphrase" in refused.error
    assert not (tmp_path / "backup").exists()
    made = relay("ca", "backup", tmp_path / "backup", "--plain")
    assert made.code == 0
    assert "not encrypted" in made.err
    state.rename(tmp_path / "lost")
    unsaid = relay("ca", "restore", tmp_path / "backup", "--identity", backup_key(tmp_path)[0])
    assert unsaid.code == 2
    assert "--plain" in unsaid.error
    assert not state.exists()
    assert relay("ca", "restore", tmp_path / "backup", "--plain").code == 0


def test_a_backup_is_never_overwritten(relay: Relay, tmp_path: Path) -> None:
    relay("ca", "init")
    relay("ca", "backup", tmp_path / "backup", "--plain")
    before = (tmp_path / "backup").read_bytes()
    again = relay("ca", "backup", tmp_path / "backup", "--plain")
    assert again.code == 3
    assert "not overwritten" in again.error
    assert (tmp_path / "backup").read_bytes() == before


def test_a_backup_that_others_can_read_is_not_restored(relay: Relay, state: Path, tmp_path: Path) -> None:
    relay("ca", "init")
    relay("ca", "backup", tmp_path / "backup", "--plain")
    (tmp_path / "backup").chmod(0o644)
    state.rename(tmp_path / "lost")
    refused = relay("ca", "restore", tmp_path / "backup", "--plain")
    assert refused.code == 3
    assert "chmod 600" in refused.error
    assert not state.exists()


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        pytest.param(["backup", "F", "--plain", "--recipient", "age1"], 2, "exclude", id="two ways"),
        pytest.param(["restore", "F", "--plain", "--identity", "F"], 2, "exclude", id="two ways back"),
        pytest.param(["backup", "F", "--recipient", "age1no"], 2, "age1", id="no recipient"),
        pytest.param(["backup", "F", "--passphrase-file", "EMPTY"], 2, "empty", id="an empty passphrase"),
        pytest.param(["restore", "F", "--plain"], 3, "No such file", id="no backup"),
    ],
)
def test_what_cannot_be_backed_up_or_restored_is_said_in_one_line(
    relay: Relay, tmp_path: Path, arguments: list[str], code: int, text: str
) -> None:
    relay("ca", "init")
    write_atomic(tmp_path / "empty", "\n", PRIVATE)
    places = {"F": tmp_path / "backup", "EMPTY": tmp_path / "empty"}
    outcome = relay("ca", *(places.get(argument, argument) for argument in arguments))
    assert outcome.code == code
    assert text in outcome.error
    assert not (tmp_path / "backup").exists()


def test_ca_issue_server_writes_what_a_broker_reads(relay: Relay, tmp_path: Path) -> None:
    relay("ca", "init")
    outcome = relay("ca", "issue-server", "mqtt.example", "127.0.0.1", "::1", "--out", tmp_path / "broker")
    assert (outcome.code, outcome.out) == (0, "")
    names = sorted(path.name for path in (tmp_path / "broker").iterdir())
    assert names == ["roots.pem", "server.key", "server.pem"]
    assert mode(tmp_path / "broker" / "server.key") == 0o600


@pytest.mark.parametrize(("host", "code"), [(NODE_ID, 3), ("*.example", 2), ("https://mqtt.example", 2)])
def test_ca_issue_server_does_not_issue_for_what_is_no_host(
    relay: Relay, tmp_path: Path, host: str, code: int
) -> None:
    relay("ca", "init")
    outcome = relay("ca", "issue-server", host, "--out", tmp_path)
    assert outcome.code == code
    assert outcome.error.isprintable()
    assert listed(relay) == []


# --- join tokens --------------------------------------------------------------------------------------


def joins(relay: Relay) -> list[dict[str, object]]:
    outcome = relay("join-token", "list", "--json")
    assert (outcome.code, outcome.err) == (0, "")
    found: list[dict[str, object]] = json.loads(outcome.out)
    return found


def test_join_token_create_prints_the_token_alone_and_says_besides_what_to_type(
    relay: Relay, state: Path
) -> None:
    relay("ca", "init")
    outcome = relay(
        *("join-token", "create", "--tenant", "acme", "--ttl", "2h", "--uses", "3"),
        *("--public-url", "https://relay.example/"),
    )
    assert outcome.code == 0
    token = JoinToken.parse(outcome.out)
    assert outcome.out == token.text() + "\n"
    root = (state / "ca" / "root.pem").read_text()
    assert token.fingerprint == sha256(certificates_in(root)[0]).digest()
    assert "  kubelet enroll https://relay.example --token-file FILE\n" in outcome.err
    assert token.text() not in outcome.err
    assert mode(state / "join_tokens.jsonl") == 0o600
    [join] = joins(relay)
    assert (join["id"], join["tenant"], join["uses"], join["state"]) == (token.id, "acme", 3, "open")
    assert int(str(join["expires_at_ms"])) - int(str(join["created_ms"])) == 7_200_000


def test_a_join_token_is_for_one_node_and_an_hour_unless_told(relay: Relay) -> None:
    relay("ca", "init")
    relay("join-token", "create")
    [join] = joins(relay)
    assert (join["tenant"], join["uses"]) == ("default", 1)
    assert int(str(join["expires_at_ms"])) - int(str(join["created_ms"])) == 3_600_000


def test_the_command_to_type_is_one_that_the_node_accepts(relay: Relay) -> None:
    relay("ca", "init")
    plain = relay("join-token", "create", "--public-url", "http://192.0.2.1:8700")
    assert f"kubelet enroll http://192.0.2.1:8700 {PLAIN_OPTION} --token-file FILE\n" in plain.err


def test_on_a_terminal_the_line_to_paste_on_the_node_is_printed(
    relay: Relay, monkeypatch: pytest.MonkeyPatch
) -> None:
    relay("ca", "init")
    monkeypatch.setattr("relay.cli.join_tokens.is_terminal", lambda: True)
    outcome = relay("join-token", "create", "--public-url", "https://relay.example")
    variable, *command = outcome.out.split()
    token = JoinToken.parse(variable.removeprefix("EDGE_JOIN_TOKEN="))
    assert token.text() in outcome.out
    assert command == ["kubelet", "enroll", "https://relay.example"]
    assert outcome.err.endswith("Paste this line on the node:\n")
    listed = relay("join-token", "create", "--public-url", "https://relay.example", "--json")
    facts = json.loads(listed.out)
    assert facts["line"] == f"EDGE_JOIN_TOKEN={facts['token']} kubelet enroll https://relay.example"


def test_during_a_rotation_a_join_token_names_the_root_that_the_relay_still_shows(
    relay: Relay, state: Path
) -> None:
    relay("ca", "init")
    old = (state / "ca" / "root.pem").read_text()
    relay("ca", "rotate-root")
    token = JoinToken.parse(relay("join-token", "create").out)
    assert token.fingerprint == sha256(certificates_in(old)[0]).digest()


def test_join_token_list_shows_no_secret(relay: Relay) -> None:
    relay("ca", "init")
    assert relay("join-token", "list").out.split()[0] == "ID"
    token = relay("join-token", "create", "--tenant", "acme").out.strip()
    _, join_id, secret, _ = token.split(".")
    for outcome in (relay("join-token", "list"), relay("join-token", "list", "--json")):
        assert join_id in outcome.out
        assert secret not in outcome.out
    assert relay("join-token", "list").out.splitlines()[1].split()[0:2] == [join_id, "acme"]
    assert relay("join-token", "list").out.splitlines()[1].split()[-2:] == ["0/1", "open"]


def test_join_token_revoke_makes_it_void(relay: Relay) -> None:
    relay("ca", "init")
    join_id = relay("join-token", "create").out.split(".")[1]
    outcome = relay("join-token", "revoke", join_id)
    assert (outcome.code, outcome.out, outcome.err) == (0, "", f"revoked {join_id}\n")
    assert relay("join-token", "revoke", join_id).err == f"{join_id} was revoked before\n"
    assert joins(relay)[0]["state"] == "revoked"


def test_join_token_revoke_of_what_never_was_is_a_no(relay: Relay) -> None:
    relay("ca", "init")
    outcome = relay("join-token", "revoke", "\x1b[31m")
    assert outcome.code == 1
    assert outcome.error.isprintable()


def test_a_join_token_of_another_machine_is_revoked_where_the_cas_key_is_not(
    relay: Relay, state: Path
) -> None:
    join_id = "01HZX9K3M4P7Q8R9S0T1V2W3XY"
    for before in ([], ["ca", "init"]):
        relay(*before)
        assert relay("join-token", "revoke", join_id).code == 1
    (state / "ca" / "root.key").unlink()
    outcome = relay("join-token", "revoke", join_id, "--json")
    assert json.loads(outcome.out) == {"id": join_id, "revoked_now": True}
    assert relay("join-token", "revoke", join_id).err == f"{join_id} was revoked before\n"
    another = relay("join-token", "revoke", join_id[::-1])
    assert "as soon as both are connected to NATS" in another.err
    assert relay("join-token", "revoke", "x").code == 1


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
    relay("ca", "init")
    outcome = relay("join-token", "create", *arguments)
    assert outcome.code == 2
    assert outcome.error.isprintable()
    assert not (state / "join_tokens.jsonl").exists()


@pytest.mark.parametrize("command", [["create"], ["list"], ["revoke", "x"]])
def test_join_tokens_that_others_can_read_are_not_used(relay: Relay, state: Path, command: list[str]) -> None:
    relay("ca", "init")
    relay("join-token", "create")
    (state / "join_tokens.jsonl").chmod(0o644)
    outcome = relay("join-token", *command)
    assert outcome.code == 3
    assert f"chmod 600 {state / 'join_tokens.jsonl'}" in outcome.error


# --- tokens -------------------------------------------------------------------------------------------


def test_token_issue_prints_the_token_alone_and_says_besides_by_what_it_can_be_revoked(
    relay: Relay, state: Path, registry: SchemaRegistry
) -> None:
    relay("ca", "init")
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
        audience="https://relay.example/mcp",
        now_s=now_ms(state / "token.key") // 1000,
    )
    assert (claims["iss"], claims["sub"], claims["tenant"]) == ("https://relay.example", "agent-1", "acme")
    assert claims["scope"] == "tools:call:read_only sessions:message"
    assert claims["exp"] - claims["iat"] == 7200
    until = datetime.fromtimestamp(claims["exp"], UTC).strftime("%Y-%m-%d %H:%M")
    facts = f"agent-1 of tenant acme, for https://relay.example/mcp, until {until} UTC"
    assert outcome.err == f"jti {claims['jti']}: {facts}\n"


def test_a_token_lasts_thirty_days_unless_told(relay: Relay) -> None:
    relay("ca", "init")
    claims = json.loads(from_base64url(relay("token", "issue", "--sub", "agent-1").out.split(".")[1]))
    assert claims["exp"] - claims["iat"] == 30 * 86_400


@pytest.mark.parametrize("command", [["issue", "--sub", "agent-1"], ["list"], ["revoke", "a-jti"]])
def test_no_command_for_tokens_makes_a_key(relay: Relay, state: Path, command: list[str]) -> None:
    outcome = relay("token", *command)
    assert outcome.code == 3
    assert "--state-dir" in outcome.error
    assert not state.exists()


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("--tenant", "Acme", "--tenant must match the pattern"),
        ("--sub", "", "--sub must have at least 1 character, for example my-agent"),
        ("--sub", "x" * 129, "--sub must have at most 128 characters"),
    ],
)
def test_a_token_that_cannot_be_is_refused_by_the_name_of_the_option(
    relay: Relay, option: str, value: str, said: str
) -> None:
    relay("ca", "init")
    sub_option = () if option == "--sub" else ("--sub", "ant")
    outcome = relay("token", "issue", *sub_option, option, value)
    assert (outcome.code, said in outcome.error) == (2, True)


def test_the_tokens_that_were_issued_are_listed_with_their_state(relay: Relay) -> None:
    relay("ca", "init")
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


def test_the_token_of_a_demo_is_listed(relay: Relay, state: Path) -> None:
    plan = replace(plan_below(state.parent), state=StateFiles(state))
    payload = issue_token(plan, "demo-agent").split(".")[1]
    (listed,) = json.loads(relay("token", "list", "--json").out)
    assert (listed["sub"], listed["state"]) == ("demo-agent", "valid")
    assert listed["jti"] == json.loads(from_base64url(payload))["jti"]


def test_an_issued_token_is_never_kept(relay: Relay, state: Path) -> None:
    relay("ca", "init")
    token = relay("token", "issue", "--sub", "agent-1").out.strip()
    signature = token.rsplit(".", 1)[1]
    assert not [
        path for path in state.rglob("*") if path.is_file() and signature in path.read_text("latin-1")
    ]
    assert mode(state / "issued_tokens.jsonl") == 0o600


def test_what_a_command_was_given_first_later_commands_need_not_be_given(relay: Relay) -> None:
    relay("ca", "init")
    relay("join-token", "create", "--tenant", "acme", "--public-url", "https://relay.example")
    issued = relay("token", "issue", "--sub", "agent-1")
    assert "tenant acme, for https://relay.example/mcp" in issued.err
    other = relay(
        "token", "issue", "--sub", "agent-1", "--tenant", "beta", "--public-url", "https://b.example"
    )
    assert "tenant beta, for https://b.example/mcp" in other.err
    assert "tenant acme, for https://relay.example/mcp" in relay("token", "issue", "--sub", "agent-1").err


def test_what_was_refused_is_not_kept(relay: Relay, state: Path) -> None:
    relay("ca", "init")
    relay("token", "issue", "--sub", "agent-1", "--tenant", "Not A Tenant")
    assert not (state / "settings.json").exists()


@pytest.mark.integration
def test_nothing_is_kept_where_there_is_no_relay(relay: Relay, state: Path) -> None:
    assert relay(*RUN).code == 3
    assert not state.exists()


@pytest.mark.integration
def test_a_relay_that_finds_no_broker_names_the_three_ways_out(
    relay: Relay, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("relay.broker.program._DISTRIBUTION", "no-such-distribution")
    relay("ca", "init")
    outcome = relay("run", "--listen", f"127.0.0.1:{FREE_PORT}")
    assert outcome.code == 3
    # The line about a broker's port is not always there; the error is the last.
    error = outcome.err.splitlines()[-1]
    assert error.startswith("relay: no broker: nats-server is not on PATH")
    for way in ("pip install 'edge-kubelet[broker]'", "--broker", "--no-broker"):
        assert way in error


def jti_of(issued: Outcome) -> str:
    return issued.err.removeprefix("jti ").partition(":")[0]


def test_a_token_allows_reading_and_nothing_more_unless_told(relay: Relay) -> None:
    relay("ca", "init")
    token = relay("token", "issue", "--sub", "agent-1").out
    claims = token.split(".")[1]
    assert json.loads(from_base64url(claims))["scope"] == "tools:call:read_only"


def test_a_token_is_revoked_by_its_jti_once_and_for_all(relay: Relay, state: Path) -> None:
    relay("ca", "init")
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
    relay("ca", "init")
    outcome = relay("token", "revoke", jti)
    assert outcome.code == 2
    assert outcome.error.isprintable()
    assert not (state / "revoked_tokens.jsonl").exists()


def test_a_new_key_signs_tokens_and_those_by_the_old_one_are_accepted_until_its_end(
    relay: Relay, state: Path
) -> None:
    relay("ca", "init")
    old = read_key(state / "token.key")
    before = now_ms(state / "token.key")
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
    relay("ca", "init")
    (state / "token_keys.jsonl").unlink()
    old = key_id(bytes(read_key(state / "token.key").verify_key))
    outcome = relay("token", "rotate-key")
    assert "tokens by older keys are accepted until" in outcome.err
    assert "make a backup now" in outcome.err
    until_ms = token_keys(state).accepted()[old].until_ms
    assert until_ms is not None


def test_a_key_that_was_replaced_signs_no_token(relay: Relay, state: Path) -> None:
    relay("ca", "init")
    old = (state / "token.key").read_text()
    relay("token", "rotate-key")
    write_atomic(state / "token.key", old, PRIVATE)  # as from a backup
    outcome = relay("token", "issue", "--sub", "agent-1")
    assert (outcome.code, outcome.out) == (3, "")
    assert "relay token rotate-key" in outcome.error


def test_without_the_keys_tokens_are_issued_elsewhere_and_revoked_here(relay: Relay, state: Path) -> None:
    relay("ca", "init")
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


def test_nothing_is_revoked_where_there_is_no_relay(relay: Relay, state: Path) -> None:
    outcome = relay("token", "revoke", "a-jti")
    assert outcome.code == 3
    assert str(state) in outcome.error


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        pytest.param(["--scope", "root\x1b[31m"], "root\\x1b[31m", id="no such scope"),
        pytest.param(["--ttl", "1w"], "1w", id="no duration"),
        pytest.param(["--ttl", "0s"], "0s", id="no time at all"),
        pytest.param(["--ttl", "366d"], "--ttl must be within 365 days", id="more than a year"),
        pytest.param(["--ttl", "-1s"], "-1s", id="time that has passed"),
        pytest.param(["--tenant", "Not A Tenant"], "--tenant", id="no tenant"),
        pytest.param(["--sub", ""], "--sub", id="no subject"),
        pytest.param(["--public-url", "ftp://relay.example"], "ftp://relay.example", id="no URL of a relay"),
        pytest.param(["--public-url", "https://u:p@relay.example"], "relay.example", id="credentials"),
    ],
)
def test_a_token_that_cannot_be_is_a_wrong_command_line(
    relay: Relay, arguments: list[str], word: str
) -> None:
    relay("ca", "init")
    outcome = relay("token", "issue", "--sub", "agent-1", *arguments)
    assert outcome.code == 2
    assert word in outcome.error
    assert outcome.error.isprintable()


# --- what is wrong with things as they are ------------------------------------------------------------

RUN = ["run", "--broker", "127.0.0.1:1", "--listen", f"127.0.0.1:{FREE_PORT}"]


@pytest.mark.integration
@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        pytest.param(RUN, "relay ca init", id="run without a CA"),
        pytest.param(["ca", "issue", "--mock", "1", "--out", "/nowhere"], "relay ca init", id="no CA"),
        pytest.param(["ca", "issue", "/nowhere/node.csr"], "/nowhere/node.csr", id="no such file"),
        pytest.param(["ca", "list"], "relay ca init", id="nothing to list"),
        pytest.param(["ca", "revoke", NODE_ID], "relay ca init", id="nothing to revoke"),
        pytest.param(["ca", "rotate-root"], "relay ca init", id="nothing to rotate"),
        pytest.param(["ca", "backup", "/nowhere/backup", "--plain"], "relay ca init", id="nothing to keep"),
        pytest.param(["join-token", "create"], "relay ca init", id="nothing to join"),
    ],
)
def test_what_is_missing_is_said_in_one_line(relay: Relay, arguments: list[str], word: str) -> None:
    outcome = relay(*arguments)
    assert outcome.code == 3
    assert word in outcome.error


@pytest.mark.integration
@pytest.mark.parametrize(
    ("name", "content", "arguments"),
    [
        pytest.param("marks/marks.sqlite3", b"no database" * 100, RUN, id="marks"),
        pytest.param("token.key", b"no key", RUN, id="token key"),
        pytest.param("token.key", b"\xff", ["token", "issue", "--sub", "x"], id="token key, issuing"),
        pytest.param("revoked_tokens.jsonl", b"no entry\n", RUN, id="revoked tokens"),
        pytest.param("revoked_tokens.jsonl", b'{"jti":1}\n', ["token", "list"], id="revoked tokens, listing"),
        pytest.param("issued_tokens.jsonl", b'{"jti":1}\n', ["token", "revoke", "x"], id="issued tokens"),
        pytest.param("settings.json", b"[]", RUN, id="settings"),
        pytest.param("ca/root.pem", b"no root", RUN, id="root"),
        pytest.param("ca/ledger.jsonl", b'{"action":"rev\n', RUN, id="ledger"),
        pytest.param("ca/ledger.jsonl", b"{}\n", ["ca", "list"], id="ledger, listing"),
        pytest.param("ca/ledger.jsonl", b"[]\n", ["ca", "revoke", NODE_ID], id="ledger, revoking"),
        pytest.param("join_tokens.jsonl", b"{}\n", ["join-token", "list"], id="join tokens"),
        pytest.param(
            "join_tokens.jsonl", b"damaged\n", ["join-token", "revoke", "x"], id="join tokens, revoking"
        ),
        pytest.param("ca/root.key", b"no key", ["ca", "issue", "--mock", "1", "--out", "."], id="root key"),
    ],
)
def test_a_damaged_file_is_said_in_one_line_that_names_it(  # noqa: PLR0913, PLR0917 - the table's columns and the parts
    relay: Relay,
    state: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    content: bytes,
    arguments: list[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    relay("ca", "init")
    damaged = state / name
    make_private_directory(damaged.parent)
    damaged.touch(mode=0o600)
    damaged.write_bytes(content)
    outcome = relay(*arguments)
    assert outcome.code == 3
    assert damaged.name in outcome.error
    assert damaged.read_bytes() == content


@pytest.mark.integration
@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        pytest.param("token.key", RUN, id="token key"),
        pytest.param("ca/root.key", ["ca", "issue", "--mock", "1", "--out", "."], id="root key"),
    ],
)
def test_a_key_that_others_can_read_is_not_used(  # noqa: PLR0913, PLR0917 - as above
    relay: Relay,
    state: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    arguments: list[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    relay("ca", "init")
    relay("token", "issue", "--sub", "x")
    (state / name).chmod(0o644)
    outcome = relay(*arguments)
    assert outcome.code == 3
    assert f"chmod 600 {state / name}" in outcome.error


@pytest.mark.integration
def test_a_port_that_is_taken_is_said_in_one_line(relay: Relay) -> None:
    relay("ca", "init")
    with bind(HostPort("127.0.0.1", 0)) as taken:
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        outcome = relay(*RUN, "--listen", address)
    assert outcome.code == 3
    assert f"cannot listen on {address}" in outcome.error


def test_a_state_directory_that_is_none_is_said_in_one_line(relay: Relay, state: Path) -> None:
    state.write_text("a file")
    outcome = relay("ca", "init")
    assert outcome.code == 3
    assert str(state) in outcome.error


TLS = [*RUN, "--public-url", "https://127.0.0.1:8700", "--tls-certificate", "PEM", "--tls-key", "KEY"]


@pytest.mark.integration
@pytest.mark.parametrize(
    ("pem", "key", "mode", "word"),
    [
        pytest.param(None, "key", 0o600, "relay.pem", id="no certificate"),
        pytest.param("pem", None, 0o600, "relay.key", id="no key"),
        pytest.param("pem", "key", 0o640, "chmod 600", id="a key that others can read"),
        pytest.param("pem", "key", 0o600, "are not a certificate and its key", id="something else"),
    ],
)
def test_a_certificate_that_cannot_be_served_is_said_in_one_line(  # noqa: PLR0913, PLR0917 - a table's columns
    relay: Relay, tmp_path: Path, pem: str | None, key: str | None, mode: int, word: str
) -> None:
    relay("ca", "init")
    files = {"PEM": tmp_path / "relay.pem", "KEY": tmp_path / "relay.key"}
    for path, content in zip(files.values(), (pem, key), strict=True):
        if content is not None:
            path.write_text(content)
            path.chmod(mode)
    outcome = relay(*(files.get(argument, argument) for argument in TLS))
    assert outcome.code == 3
    assert word in outcome.error


# --- what is wrong with the command line --------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        pytest.param(["run", "--broker", "nowhere"], "nowhere", id="no port"),
        pytest.param(["run", "--broker", "127.0.0.1:99999"], "99999", id="no such port"),
        pytest.param([*RUN, "--listen", "8700"], "8700", id="no host"),
        pytest.param([*RUN, "--listen", "0.0.0.0:8700"], "--tls-own", id="open to others"),
        pytest.param([*RUN, "--listen", "192.0.2.1:8700"], "--tls-own", id="another address"),
        pytest.param([*RUN, "--public-url", "http://relay.example"], "use https", id="a URL in the clear"),
        pytest.param([*RUN, "--broker", "mqtt.example:1883"], "use mqtts", id="a broker in the clear"),
        pytest.param([*RUN, "--node-broker", "nowhere"], "nowhere", id="no port for nodes"),
        pytest.param([*RUN, "--node-broker", "mqtt://mqtt.example"], "use mqtts", id="nodes in the clear"),
        pytest.param([*RUN, "--tls-own"], "--public-url", id="TLS under a URL without"),
        pytest.param([*RUN, "--tls-key", "relay.key"], "--tls-certificate", id="a key alone"),
        pytest.param([*RUN, "--tls-certificate", "relay.pem"], "--tls-key", id="a certificate alone"),
        pytest.param([*RUN, "--tls-own", "--tls-key", "relay.key"], "--tls-own", id="two certificates"),
        pytest.param([*RUN, "--public-url", "relay.example"], "relay.example", id="no URL"),
        pytest.param([*RUN, "--public-url", "https://relay.example/x"], "relay.example/x", id="a path"),
        pytest.param(
            [*RUN, "--jwks", "https://issuer.example/keys"], "--issuer", id="keys without an issuer"
        ),
        pytest.param([*RUN, "--issuer", "https://issuer.example"], "--jwks", id="an issuer without keys"),
        pytest.param([*RUN, "--jwks", "", "--issuer", ""], "--issuer", id="an issuer without a name"),
        pytest.param(
            [*RUN, "--jwks", "file:///etc/keys", "--issuer", "https://issuer.example"], "--jwks", id="a file"
        ),
        pytest.param([*RUN, "--agent-rps", "0"], "from 1 to", id="no calls at all"),
        pytest.param([*RUN, "--caller-timeout", "60"], "write 90s", id="a time without a unit"),
        pytest.param([*RUN, "--caller-timeout", "2h"], "from 1s to 1h", id="a time that is too long"),
        pytest.param([*RUN, "--envelope", "on"], "off, shadow, enforce", id="no such mode"),
    ],
)
def test_a_setting_that_cannot_be_used_has_an_exit_code_of_its_own(
    relay: Relay, arguments: list[str], word: str
) -> None:
    relay("ca", "init")
    outcome = relay(*arguments)
    assert outcome.code == 78
    assert word in outcome.error
    assert outcome.error.isprintable()


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        pytest.param(["ca", "issue"], "CSR", id="nothing to issue for"),
        pytest.param(["ca", "issue", "--mock", "1"], "--out", id="mocks without a place"),
        pytest.param(["ca", "issue", "x.csr", "--mock", "1", "--out", "."], "without a CSR", id="both"),
    ],
)
def test_a_wrong_command_line_is_said_in_one_line(relay: Relay, arguments: list[str], word: str) -> None:
    relay("ca", "init")
    outcome = relay(*arguments)
    assert outcome.code == 2
    assert word in outcome.error
    assert outcome.error.isprintable()


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param(["token", "issue"], id="a missing option"),
        pytest.param(["fly"], id="an unknown command"),
        pytest.param(["ca", "issue", "--mock", "0"], id="a number out of range"),
        pytest.param(["token", "issue", "--sub", "x", "--what"], id="an unknown option"),
    ],
)
def test_what_the_parser_refuses_is_a_wrong_command_line(relay: Relay, arguments: list[str]) -> None:
    outcome = relay(*arguments)
    assert (outcome.code, outcome.out) == (2, "")
    assert "Traceback" not in outcome.err


@pytest.mark.parametrize("arguments", [["--help"], ["ca", "--help"], ["token", "issue", "--help"]])
def test_help_is_a_result(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["relay", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 0
    assert "Usage" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [["config", "check"], ["token", "list"], ["run", "--no-broker"]])
def test_a_user_without_a_home_directory_has_to_name_the_state_directory(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    without_home(monkeypatch)
    monkeypatch.setattr(sys, "argv", ["relay", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    printed = capsys.readouterr().err.removeprefix("relay: ")
    assert ended.value.code == 78
    assert printed == "name the state directory with --state-dir: this user has no home directory\n"


def test_a_user_without_a_home_directory_needs_none_where_the_state_directory_is_named(
    relay: Relay, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_home(monkeypatch)
    assert relay("ca", "init").code == 0
    assert relay("config", "check", "--no-broker").code == 0


@pytest.mark.integration
def test_the_module_is_the_same_command(tmp_path: Path) -> None:
    command = [sys.executable, "-P", "-m", "relay", "run", "--broker", "x", "--state-dir", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout) == (78, "")
    assert done.stderr.startswith("relay: ")
    assert done.stderr.count("\n") == 1


# --- the audit ----------------------------------------------------------------------------------------

HOSTILE = "\x1b[2J\u202e"


@pytest.fixture
def audit(state: Path) -> Iterator[WrittenAudit]:
    """An audit of three lines, and a relay that goes on writing it."""
    state.mkdir()
    audit = WrittenAudit(state)
    audit.write(3)
    yield audit
    audit.close()


def test_audit_verify_says_what_stands_there(relay: Relay, audit: WrittenAudit) -> None:
    head = audit.write()
    outcome = relay("audit", "verify")
    assert (outcome.code, outcome.err) == (0, "")
    assert outcome.out.startswith("audit    intact\n")
    assert f"head     {head}\n" in outcome.out
    facts = json.loads(relay("audit", "verify", "--json").out)
    assert (facts["intact"], facts["lines"], facts["head"], facts["broken"]) == (True, 4, head, None)


def test_audit_verify_exits_1_and_names_the_line_when_the_chain_is_broken(
    relay: Relay, audit: WrittenAudit
) -> None:
    audit.change(lambda lines: lines.pop(1))
    outcome = relay("audit", "verify")
    assert (outcome.code, outcome.err) == (1, "")
    assert "broken   audit.jsonl line 2: " in outcome.out
    facts = json.loads(relay("audit", "verify", "--json").out)
    assert (facts["intact"], facts["broken"]["file"], facts["broken"]["line"]) == (False, "audit.jsonl", 2)


def test_audit_verify_proves_with_a_hash_noted_earlier_that_nothing_was_cut_off(
    relay: Relay, audit: WrittenAudit
) -> None:
    head = audit.write()
    assert relay("audit", "verify", "--expect", head).code == 0
    audit.change(lambda lines: lines.pop())
    outcome = relay("audit", "verify", "--expect", head)
    assert outcome.code == 1
    assert "cut off" in outcome.out


@pytest.mark.parametrize(
    "lose",
    [
        pytest.param(lambda audit: audit.change(lambda lines: lines.pop()), id="the last line is cut off"),
        pytest.param(lambda audit: audit.change(lambda lines: lines.clear()), id="it was emptied"),
        pytest.param(lambda audit: audit.path.unlink(), id="a file is gone"),
    ],
)
def test_audit_verify_exits_4_when_what_it_verified_the_last_time_is_lost(
    relay: Relay, audit: WrittenAudit, state: Path, lose: Callable[[WrittenAudit], object]
) -> None:
    audit.rotate()
    audit.write(2)
    assert relay("audit", "verify").code == 0
    assert relay("audit", "verify").code == 0
    whole = audit.path.read_bytes()
    lose(audit)
    outcome = relay("audit", "verify")
    assert (outcome.code, outcome.err) == (4, "")
    assert outcome.out.startswith("audit    NOT INTACT\nmissing  the newest line of the last verification")
    assert relay("audit", "verify").code == 4  # and reported again
    facts = json.loads(relay("audit", "verify", "--json").out)
    assert (facts["intact"], facts["last_verified"], facts["broken"]) == (False, False, None)
    audit.path.write_bytes(whole)
    assert relay("audit", "verify").code == 0
    lose(audit)
    assert relay("audit", "verify", "--accept-loss").code == 0
    assert relay("audit", "verify").code == 0
    assert stat.S_IMODE((state / "audit-verified.json").stat().st_mode) == 0o644


def test_audit_verify_goes_on_when_the_files_before_the_last_verified_line_are_archived(
    relay: Relay, audit: WrittenAudit
) -> None:
    assert relay("audit", "verify").code == 0
    audit.rotate()
    audit.write(2)
    audit.files[0].unlink()  # its last line is the one that was verified: the next file names it
    assert relay("audit", "verify").code == 0


def test_audit_verify_of_a_broken_chain_exits_1_and_keeps_what_was_verified(
    relay: Relay, audit: WrittenAudit, state: Path
) -> None:
    assert relay("audit", "verify").code == 0
    kept = (state / "audit-verified.json").read_bytes()
    audit.write()
    audit.change(lambda lines: lines.pop(1))
    assert relay("audit", "verify").code == 1
    assert (state / "audit-verified.json").read_bytes() == kept


def test_audit_verify_shows_how_far_it_is_to_a_person_alone(
    relay: Relay, audit: WrittenAudit, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("relay.cli.audit._QUIET_S", -1)
    assert audit.path.exists()
    assert relay("audit", "verify").err == ""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    outcome = relay("audit", "verify")
    assert "%" in outcome.err
    assert outcome.err.endswith("\r     \r")
    assert "%" not in outcome.out


def test_audit_tail_shows_the_newest_lines(relay: Relay, audit: WrittenAudit) -> None:
    audit.rotate()
    audit.write(30)
    assert len(relay("audit", "tail").out.splitlines()) == 20
    lines = [line for file in audit.files for line in file.read_text().splitlines()]
    outcome = relay("audit", "tail", "-n", "31", "--json")
    assert (outcome.code, outcome.err) == (0, "")
    assert outcome.out.splitlines() == lines[-31:]


def test_audit_tail_json_prints_no_byte_that_a_terminal_obeys(relay: Relay, audit: WrittenAudit) -> None:
    raw = json.dumps({"tool": HOSTILE}, ensure_ascii=False).encode()
    audit.change(lambda lines: lines.extend([raw, b'{"tool":"\xc2\x9b31m"}', b"\x1b[2J"]))
    outcome = relay("audit", "tail", "-n", "3", "--json")
    assert [json.loads(line) for line in outcome.out.splitlines()] == [{"tool": HOSTILE}, {"tool": "\x9b31m"}]
    assert all(line.isascii() and line.isprintable() for line in (outcome.out + outcome.err).splitlines())
    assert "left out" in outcome.err


def test_audit_grep_shows_the_lines_that_say_all_of_it(relay: Relay, audit: WrittenAudit) -> None:
    assert audit.path.exists()
    outcome = relay("audit", "grep", "number=2", f"ts_ms={NOW_MS}", "--json")
    assert (outcome.code, outcome.err) == (0, "")
    assert json.loads(outcome.out)["number"] == 2
    assert len(relay("audit", "grep").out.splitlines()) == 3


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        pytest.param(["tenant=acme"], "", id="a field that lines can have"),
        pytest.param(["tennant=acme"], "no line has a field tennant; there are ts_ms, ", id="a slip"),
        pytest.param(["--since", "1s"], "", id="nothing so new"),
        pytest.param(["--since", "2999-01-01"], "", id="nothing from the future"),
    ],
)
def test_audit_grep_exits_1_when_no_line_says_it(
    relay: Relay, audit: WrittenAudit, arguments: list[str], said: str
) -> None:
    assert audit.path.exists()
    outcome = relay("audit", "grep", *arguments)
    assert (outcome.code, outcome.out) == (1, "")
    assert said in outcome.err
    assert bool(outcome.err) == bool(said)


@pytest.mark.parametrize(
    "since", ["99999d", "2025-10-09T08:53:20", "2025-10-09 10:53:20+02:00", "2025-10-09"]
)
def test_audit_grep_knows_times_in_several_forms(relay: Relay, audit: WrittenAudit, since: str) -> None:
    assert audit.path.exists()  # lines of 2025-10-09 08:53:20 UTC
    assert len(relay("audit", "grep", "--since", since).out.splitlines()) == 3


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        pytest.param(["grep", "acme"], "FIELD=VALUE", id="no field"),
        pytest.param(["grep", "=acme"], "FIELD=VALUE", id="a field without a name"),
        pytest.param(["grep", "--since", f"soon{HOSTILE}"], "soon\\x1b", id="no time"),
        pytest.param(["grep", "--since", "0s"], "0s", id="no duration"),
        pytest.param(["verify", "--expect", "abc"], "--expect", id="no hash"),
        pytest.param(["verify", "--expect", "A" * 64], "--expect", id="a hash in capitals"),
    ],
)
def test_a_question_to_the_audit_that_is_none_is_a_wrong_command_line(
    relay: Relay, arguments: list[str], word: str
) -> None:
    outcome = relay("audit", *arguments)
    assert outcome.code == 2
    assert word in outcome.error


@pytest.mark.parametrize("command", ["verify", "tail", "grep"])
def test_where_there_is_no_audit_that_is_said_in_one_line(relay: Relay, state: Path, command: str) -> None:
    outcome = relay("audit", command)
    assert outcome.code == 3
    assert f"there is no audit in {state}" in outcome.error


def test_verify_exits_4_when_the_whole_verified_audit_was_removed(relay: Relay, audit: WrittenAudit) -> None:
    assert relay("audit", "verify").code == 0
    audit.path.unlink()
    outcome = relay("audit", "verify")
    assert outcome.code == 4
    assert "one was verified before" in outcome.error
    assert relay("audit", "verify", "--accept-loss").code == 3


def test_rows_have_colour_on_a_terminal_alone(
    relay: Relay, audit: WrittenAudit, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert audit.path.exists()
    assert "\x1b" not in relay("audit", "tail").out
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert "\x1b" in relay("audit", "tail").out
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b" not in relay("audit", "tail").out


@pytest.mark.integration
async def test_audit_tail_follows_across_rotation_until_ctrl_c(state: Path, audit: WrittenAudit) -> None:
    command = [
        *(sys.executable, "-P", "-m", "relay", "audit", "tail", "-n", "1", "--follow", "--json"),
        "--state-dir",
        str(state),
    ]
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    assert process.stdout is not None
    numbers = []
    async with asyncio.timeout(60):
        for _ in range(3):
            numbers.append(json.loads(await process.stdout.readline())["number"])
            audit.rotate()
            audit.write()
        numbers.append(json.loads(await process.stdout.readline())["number"])
        process.send_signal(signal.SIGINT)
        assert await process.stdout.read() == b""
        assert await process.wait() == 0
    assert numbers == [3, 4, 5, 6]


@pytest.mark.integration
def test_a_relay_does_not_run_beside_another_in_one_state_directory(
    relay: Relay, audit: WrittenAudit
) -> None:
    relay("ca", "init")
    before = audit.path.read_bytes()
    outcome = relay(*RUN)
    assert outcome.code == 3
    assert "another relay uses the state directory" in outcome.error
    assert audit.path.read_bytes() == before


# --- errors and imports -------------------------------------------------------------------------------


def test_a_fault_of_our_own_has_a_traceback_and_the_exit_code_of_no_answer(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], state: Path
) -> None:
    def broken(_state_dir: Path | None) -> None:
        raise KeyError("a fault")

    monkeypatch.setattr("relay.cli.ca.authority", broken)
    monkeypatch.setattr(sys, "argv", ["relay", "ca", "list", "--state-dir", str(state)])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 70
    assert "KeyError: 'a fault'" in capsys.readouterr().err


def test_the_message_of_a_fault_is_escaped(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], state: Path
) -> None:
    def broken(_state_dir: Path | None) -> None:
        raise KeyError("\x1b[31m from outside")

    monkeypatch.setattr("relay.cli.ca.authority", broken)
    monkeypatch.setattr(sys, "argv", ["relay", "ca", "list", "--state-dir", str(state)])
    with pytest.raises(SystemExit):
        main()
    assert "\x1b" not in capsys.readouterr().err


@pytest.mark.integration
@pytest.mark.parametrize("command", [["run", "--broker", "127.0.0.1:1"], ["audit", "tail"], ["ca", "list"]])
def test_on_a_nodes_installation_the_command_says_in_one_line_what_to_install(
    tmp_path: Path, command: list[str]
) -> None:
    extra = ["pydantic_core", "starlette", "uvicorn", "uvloop", "httptools", "mcp", "pyrage", "httpx2"]
    code = (
        f"import sys; sys.modules.update(dict.fromkeys({extra!r}))\n"
        f"sys.argv[1:] = {[*command, '--state-dir', str(tmp_path)]!r}\n"
        "from relay.cli.entry import main; main()"
    )
    done = subprocess.run([sys.executable, "-P", "-c", code], check=False, capture_output=True, text=True)
    assert done.returncode == 3
    assert done.stderr.count("\n") == 1
    assert "pip install 'edge-kubelet[relay]'" in done.stderr


@pytest.mark.integration
def test_the_commands_load_neither_the_server_nor_its_libraries() -> None:
    code = "import sys, relay.cli.main; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-P", "-c", code], check=True, capture_output=True, text=True)
    loaded = set(done.stdout.split())
    libraries = {
        "mcp",
        "mcp_types",
        "starlette",
        "uvicorn",
        "uvloop",
        "httpx2",
        "prometheus_client",
        "structlog",
    }
    assert loaded & libraries == set()
    servers = ("relay.server", "relay.sessions", "relay.calls", "relay.mcp_api", "relay.http")
    assert [name for name in loaded if name.startswith(servers)] == []


# --- the view -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "view"),
    [((), View.TOOLS), (("--default-view", "tools"), View.TOOLS), (("--default-view", "kinds"), View.KINDS)],
)
def test_the_view_of_a_url_without_one_is_the_operators_choice(
    relay: Relay, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], view: View
) -> None:
    views: list[View] = []
    monkeypatch.setattr("relay.cli.serve.serve", lambda config, _reload: views.append(config.default_view))
    assert relay(*RUN, *arguments).code == 0
    assert views == [view]
