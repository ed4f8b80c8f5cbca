"""``relay ca``: the authority, its roots, what it issues and revokes."""

import json
import os
import resource
import signal
from hashlib import sha256
from pathlib import Path

import pytest

from schemas.certificates import is_server_root, verify_leaf
from schemas.identity import certificates_in
from schemas.identity_files import IdentityFiles
from tests.fakes.command_lines import CSR, mode, written_ms
from tests.fakes.relay_command import RelayCommand as Relay
from tests.fakes.signer import NODE_ID


@pytest.fixture
def csr(tmp_path: Path) -> Path:
    path = tmp_path / "node.csr"
    path.write_text(CSR)
    return path


def test_ca_init_makes_a_root_and_prints_where_it_lies(bare: Relay, state: Path) -> None:
    outcome = bare("ca", "init")
    assert (outcome.code, outcome.out, outcome.err) == (
        0,
        f"{state}/ca/root.pem\n{state}/ca/server-root.pem\n",
        "",
    )
    assert mode(state / "ca" / "root.key") == 0o600
    assert mode(state / "ca") == 0o700
    assert mode(state) == 0o700


def test_ca_init_a_second_time_changes_nothing(relay: Relay, state: Path) -> None:
    before = (state / "ca" / "root.pem").read_bytes()
    outcome = relay("ca", "init")
    assert outcome.code == 3
    assert "holds a CA already, which is kept: use it" in outcome.error
    assert (state / "ca" / "root.pem").read_bytes() == before


def test_ca_init_makes_the_root_of_servers_of_a_ca_that_has_none(relay: Relay, state: Path) -> None:
    before = (state / "ca" / "root.pem").read_bytes()
    for file in (state / "ca").glob("server-*"):
        file.unlink()
    assert relay("ca", "init").code == 0
    assert (state / "ca" / "root.pem").read_bytes() == before
    assert (state / "ca" / "server-root.pem").exists()
    assert mode(state / "ca" / "server-root.key") == 0o600
    assert relay("ca", "init").code == 3


def test_ca_roots_shows_both_kinds_for_people_programs_and_files(relay: Relay) -> None:
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
    nodes, servers = ((state / "ca" / name).read_text() for name in ("root.pem", "server-root.pem"))
    outcome = relay("ca", "rotate-root", "--servers", "--overlap", "30d")
    assert (outcome.code, outcome.out) == (0, f"{state}/ca/server-root.pem\n")
    assert "relay ca roots --servers --pem" in outcome.err
    assert (state / "ca" / "root.pem").read_text() == nodes
    assert servers in (state / "ca" / "server-previous.pem").read_text()
    assert "still trusted" in relay("ca", "rotate-root", "--servers").error


def test_ca_issue_prints_the_leaf_and_nothing_else(relay: Relay, state: Path, csr: Path) -> None:
    outcome = relay("ca", "issue", csr, "--tenant", "acme")
    assert (outcome.code, outcome.err) == (0, "")
    root = state / "ca" / "root.pem"
    identity = verify_leaf(outcome.out, [root.read_text()], written_ms(root))
    assert (identity.node_id, identity.tenant) == (NODE_ID, "acme")


def test_ca_issue_writes_the_leaf_where_it_is_told(relay: Relay, csr: Path, tmp_path: Path) -> None:
    outcome = relay("ca", "issue", csr, "-o", tmp_path / "leaf.pem")
    assert (outcome.code, outcome.out) == (0, "")
    assert "relay ca roots --pem" in outcome.err
    assert (tmp_path / "leaf.pem").read_text().startswith("-----BEGIN CERTIFICATE-----")


def test_ca_issue_leaves_the_place_of_the_leaf_as_it_was_if_it_fails(
    relay: Relay, csr: Path, tmp_path: Path
) -> None:
    leaf, older = tmp_path / "leaf.pem", tmp_path / "older.pem"
    older.write_text("older")
    csr.write_text("no request")
    for output in (leaf, older):
        assert relay("ca", "issue", csr, "-o", output).code == 3
        assert relay("ca", "issue", tmp_path / "missing.csr", "-o", output).code == 3
    assert not leaf.exists()
    assert older.read_text() == "older"


def test_ca_issue_leaves_no_half_of_a_leaf_and_names_what_cannot_hold_it(
    relay: Relay, csr: Path, tmp_path: Path
) -> None:
    leaf = tmp_path / "leaf.pem"
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    grows = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (600, limits[1]))
    try:
        refused = relay("ca", "issue", csr, "-o", leaf)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, grows)
    assert (refused.code, refused.error) == (3, f"relay: {leaf}: File too large")
    assert not leaf.exists()
    assert "--replace" in relay("ca", "issue", csr, "-o", leaf).error


def test_ca_issue_waits_for_neither_end_of_a_pipe(
    relay: Relay, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, csr: Path
) -> None:
    os.mkfifo(tmp_path / "pipe")
    refused = relay("ca", "issue", csr, "-o", tmp_path / "pipe")
    assert (refused.code, refused.error) == (3, f"relay: {tmp_path / 'pipe'}: No such device or address")
    monkeypatch.setattr("schemas.files.PIPE_S", 0.01)
    refused = relay("ca", "issue", tmp_path / "pipe")
    assert (refused.code, refused.error) == (
        3,
        f"relay: {tmp_path / 'pipe'}: a pipe, and not at its end after 0.01 s",
    )
    assert listed(relay) == []


def test_ca_issue_replaces_only_when_it_is_told(relay: Relay, csr: Path) -> None:
    assert relay("ca", "issue", csr).code == 0
    refused = relay("ca", "issue", csr)
    assert refused.code == 3
    assert "--replace" in refused.error
    assert relay("ca", "issue", csr, "--replace").code == 0


def test_ca_issue_replaces_within_the_tenant_unless_another_is_named(relay: Relay, csr: Path) -> None:
    for arguments in (["--tenant", "acme"], ["--replace"], ["--replace", "--tenant", "globex"]):
        assert relay("ca", "issue", csr, *arguments).code == 0
    assert [leaf["tenant"] for leaf in listed(relay)] == ["acme", "acme", "globex"]


def test_ca_issue_mock_makes_whole_identities(relay: Relay, tmp_path: Path) -> None:
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
        pytest.param(("\u202e" + CSR).encode(), id="not ASCII"),
    ],
)
def test_a_request_that_is_none_is_an_error_of_one_line(relay: Relay, csr: Path, content: bytes) -> None:
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
    header = "NODE OR SERVER TENANT KID ISSUED (UTC) EXPIRES (UTC) STATE"
    assert relay("ca", "list").out.split() == header.split()
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
    relay("ca", "issue", csr)
    [leaf] = listed(relay)
    outcome = relay("ca", "revoke", NODE_ID.upper())
    assert (outcome.code, outcome.out, outcome.err) == (0, f"{leaf['kid']}\n", "")
    again = relay("ca", "revoke", NODE_ID)
    assert (again.code, again.out) == (0, "")
    assert "was revoked before" in again.err
    relay("ca", "issue", csr, "--replace")
    kid = str(listed(relay)[1]["kid"])
    assert relay("ca", "revoke", kid[:16].upper()).out == f"{kid}\n"


def test_ca_revoke_relay_voids_all_that_was_issued_to_another_relay(
    relay: Relay, state: Path, tmp_path: Path
) -> None:
    (state / "tls").mkdir(mode=0o700)
    (state / "tls" / "relay.pem").write_text("what this one shows to its broker")
    for number in (2, 3):
        assert relay("ca", "backup", tmp_path / f"relay-{number}", "--without-ca-key", "--plain").code == 0
    second, second_at_broker, *third = listed(relay)
    name = str(second["name"])
    assert second_at_broker["name"] == "edge-relay"
    outcome = relay("ca", "revoke", "--relay", name)
    assert (outcome.code, outcome.err) == (0, "")
    assert outcome.out.split() == [second["kid"], second_at_broker["kid"]]
    assert [each["state"] for each in listed(relay)] == ["revoked", "revoked", "in force", "in force"]
    assert "was revoked before" in relay("ca", "revoke", "--relay", name).err
    assert len(third) == 2


@pytest.mark.parametrize("name", ["edge-relay", "edge-relay-0123456789abcdef", "", "\x1b[31m", NODE_ID])
def test_ca_revoke_of_a_relay_that_never_was_is_a_no(relay: Relay, name: str) -> None:
    outcome = relay("ca", "revoke", "--relay", name)
    assert outcome.code == 1
    assert "relay ca list" in outcome.error
    assert outcome.error.isprintable()


@pytest.mark.parametrize("names", [(), (NODE_ID, "--relay", "edge-relay-0123456789abcdef")])
def test_ca_revoke_of_neither_or_both_is_a_wrong_command_line(relay: Relay, names: tuple[str, ...]) -> None:
    assert relay("ca", "revoke", *names).code == 2


@pytest.mark.parametrize("target", ["unknown", NODE_ID, "0" * 64, "\x1b[31m"])
def test_ca_revoke_of_what_never_was_is_a_no(relay: Relay, target: str) -> None:
    outcome = relay("ca", "revoke", target)
    assert outcome.code == 1
    assert "relay ca list" in outcome.error
    assert outcome.error.isprintable()


def test_ca_rotate_root_says_until_when_the_old_root_is_trusted(relay: Relay, state: Path) -> None:
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
    outcome = relay("ca", "rotate-root", "--overlap", overlap)
    assert outcome.code == 2
    assert "90d" in outcome.error or "30d" in outcome.error
    assert not (state / "ca" / "previous.pem").exists()


def test_ca_issue_server_writes_what_a_broker_reads(relay: Relay, tmp_path: Path) -> None:
    outcome = relay("ca", "issue-server", "mqtt.example", "127.0.0.1", "::1", "--out", tmp_path / "broker")
    assert (outcome.code, outcome.out) == (0, "")
    names = sorted(path.name for path in (tmp_path / "broker").iterdir())
    assert names == ["roots.pem", "server.key", "server.pem"]
    assert mode(tmp_path / "broker" / "server.key") == 0o600


def test_ca_issue_server_does_not_issue_what_it_cannot_write(relay: Relay, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    outcome = relay("ca", "issue-server", "mqtt.example", "--out", tmp_path / "file" / "broker")
    assert outcome.code == 3
    assert outcome.error.isprintable()
    assert listed(relay) == []


@pytest.mark.parametrize(("host", "code"), [(NODE_ID, 3), ("*.example", 2), ("https://mqtt.example", 2)])
def test_ca_issue_server_does_not_issue_for_what_is_no_host(
    relay: Relay, tmp_path: Path, host: str, code: int
) -> None:
    outcome = relay("ca", "issue-server", host, "--out", tmp_path)
    assert outcome.code == code
    assert outcome.error.isprintable()
    assert listed(relay) == []
