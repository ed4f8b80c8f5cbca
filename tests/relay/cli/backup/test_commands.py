"""``relay ca backup`` and ``relay ca restore``."""

import asyncio
import json
import os
import stat
from contextlib import suppress
from pathlib import Path

import pyrage  # type: ignore[import-untyped]  # the library brings no types
import pytest
from cryptography.hazmat.primitives.serialization import load_pem_private_key
from cryptography.x509 import load_pem_x509_certificate

from relay.cli.backup.archive import ArchiveError, pack, unpack
from relay.cli.backup.commands import RestoreError, new_file, restore, save, save_for_another_relay
from relay.fleet.replay_marks import MarkStore
from relay.pki.authority import CertificateAuthority
from relay.pki.errors import AuthorityError, AuthorityStateError
from relay.pki.relay_tls import issued_by
from relay.settings.config import StateFiles
from relay.settings.kept import KeptSettings, read_kept
from relay.state.join_tokens import JoinTokens
from relay.state.key_files import load_or_create_key, read_key
from relay.state.names import NameLedger
from relay.state.tokens import RevokedTokens, TokenKeys, key_id
from schemas.certificates import are_endorsed, make_csr, verify_relay
from schemas.files import PRIVATE, UntrustedFileError, make_private_directory, write_atomic
from schemas.identity import certificates_in
from schemas.process.logs import make_logger
from schemas.settings import kept_run_options
from schemas.trust import HighWaterMark
from tests.fakes.clock import FakeClock
from tests.fakes.command_lines import mode
from tests.fakes.disk import full_disk
from tests.fakes.lines import LogLines
from tests.fakes.relay_command import RelayCommand as Relay
from tests.fakes.signer import NODE_ID, NOW_MS, key_named


def backup_key(tmp_path: Path) -> tuple[Path, str]:
    """Return an identity file as age-keygen writes it, and its recipient."""
    identity = pyrage.x25519.Identity.generate()
    file = tmp_path / "identity"
    write_atomic(file, f"# public key: {identity.to_public()}\n{identity}\n", PRIVATE)
    return file, str(identity.to_public())


def test_a_backup_is_encrypted_and_restored_into_an_empty_directory(
    relay: Relay, state: Path, tmp_path: Path
) -> None:
    identity, recipient = backup_key(tmp_path)
    known = kept_run_options(state)
    write_atomic(state / "run.json", json.dumps({**known, "listen": "192.0.2.1:8700"}))
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
    assert "linux.health" in known["kinds"]
    assert kept_run_options(state) == known  # and not the address of the other machine
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
    write_atomic(tmp_path / "passphrase", "correct horse\n", PRIVATE)
    assert relay("ca", "backup", tmp_path / "backup", *options(backup)).code == 0
    assert b"PRIVATE KEY" not in (tmp_path / "backup").read_bytes()
    state.rename(tmp_path / "lost")
    assert relay("ca", "restore", tmp_path / "backup", *options(restore)).code == 0
    assert (state / "ca" / "root.key").exists()


def test_a_backup_is_plain_only_when_it_is_told_and_then_says_so(
    relay: Relay, state: Path, tmp_path: Path
) -> None:
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
    relay("ca", "backup", tmp_path / "backup", "--plain")
    before = (tmp_path / "backup").read_bytes()
    again = relay("ca", "backup", tmp_path / "backup", "--plain")
    assert again.code == 3
    assert "not overwritten" in again.error
    assert (tmp_path / "backup").read_bytes() == before


def test_a_backup_that_others_can_read_is_not_restored(relay: Relay, state: Path, tmp_path: Path) -> None:
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
        pytest.param(["backup", "F", "--passphrase-file", "LETTER"], 2, "at least 12", id="one letter"),
        pytest.param(["restore", "F", "--plain"], 3, "No such file", id="no backup"),
    ],
)
def test_what_cannot_be_backed_up_or_restored_is_said_in_one_line(
    relay: Relay, tmp_path: Path, arguments: list[str], code: int, text: str
) -> None:
    write_atomic(tmp_path / "empty", "\n", PRIVATE)
    write_atomic(tmp_path / "letter", "a\n", PRIVATE)
    places = {"F": tmp_path / "backup", "EMPTY": tmp_path / "empty", "LETTER": tmp_path / "letter"}
    outcome = relay("ca", *(places.get(argument, argument) for argument in arguments))
    assert outcome.code == code
    assert text in outcome.error
    assert not (tmp_path / "backup").exists()


CSR = make_csr(key_named("the node"), NODE_ID)
LOG = make_logger("relay", LogLines())
MARK = HighWaterMark(NOW_MS, "aa" * 32)


def authority(state: StateFiles) -> CertificateAuthority:
    return CertificateAuthority(state.ca, FakeClock(NOW_MS), os.urandom)


def join_tokens(state: StateFiles) -> JoinTokens:
    return JoinTokens(state.join_tokens, FakeClock(NOW_MS), os.urandom)


async def remembered(store: MarkStore) -> None:
    store.put(NODE_ID, "acme", MARK)
    task = asyncio.create_task(store.run())
    await asyncio.sleep(0)
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task


@pytest.fixture
def used(tmp_path: Path) -> StateFiles:
    """Return the state of a relay that has run for a while."""
    state = StateFiles(tmp_path / "used")
    ca = authority(state)
    ca.create()
    ca.issue(CSR, "acme")
    ca.rotate_root()
    ca.servers.rotate()
    join_tokens(state).create("acme", 3600, 1, ca.root_pem())
    key = load_or_create_key(state.token_key, os.urandom)
    TokenKeys(state.token_keys, ca, FakeClock(NOW_MS)).add(bytes(key.verify_key), NOW_MS)
    RevokedTokens(state.revoked_tokens).revoke("a-token", now_ms=NOW_MS)
    NameLedger(state.node_names, FakeClock(NOW_MS)).label(NODE_ID, "acme", "greenhouse pi")
    make_private_directory(state.own_tls.key.parent)
    for pair in (state.own_tls, state.broker_client_tls):
        write_atomic(pair.key, f"the key of this relay {pair.key}", 0o600)
        write_atomic(pair.certificate, "the certificate of this relay")
    asyncio.run(remembered(MarkStore(state.marks, LOG)))
    write_atomic(state.audit, "{}\n", 0o600)
    make_private_directory(state.broker)
    write_atomic(state.broker / "roots.pem", "roots")
    return state


@pytest.fixture
def empty(tmp_path: Path) -> StateFiles:
    return StateFiles(tmp_path / "empty")


def content(state: StateFiles) -> dict[str, bytes]:
    files = (path for path in sorted(state.root.rglob("*")) if path.is_file())
    return {str(path.relative_to(state.root)): path.read_bytes() for path in files}


def test_a_restored_state_is_the_one_that_was_saved_but_for_what_a_relay_makes_by_itself(
    used: StateFiles, empty: StateFiles
) -> None:
    restore(save(used, authority(used), NOW_MS), empty)
    made_anew = {"audit.jsonl", "broker/roots.pem"}
    assert content(empty) == {name: data for name, data in content(used).items() if name not in made_anew}
    assert authority(empty).roots() == authority(used).roots()
    assert authority(empty).servers.roots() == authority(used).servers.roots()
    assert list(MarkStore(empty.marks, LOG).load()) == [(NODE_ID, "acme", MARK)]
    assert [grant.id for grant in join_tokens(empty).all()] == [g.id for g in join_tokens(used).all()]
    assert RevokedTokens(empty.revoked_tokens).jtis() == {"a-token"}
    assert NameLedger(empty.node_names, FakeClock(NOW_MS)).read().by_node[NODE_ID].label == "greenhouse pi"
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in empty.root.rglob("*")}
    assert {modes[name] for name in ("ca", "tls", "marks")} == {0o700}
    assert {mode for name, mode in modes.items() if name.endswith((".key", ".jsonl", ".sqlite3"))} == {0o600}


def test_what_is_restored_shows_its_group_what_a_relay_shows(used: StateFiles, empty: StateFiles) -> None:
    empty.root.mkdir(mode=0o750)
    restore(save(used, authority(used), NOW_MS), empty)
    modes = {
        str(path.relative_to(empty.root)): stat.S_IMODE(path.stat().st_mode) for path in empty.root.rglob("*")
    }
    assert {name for name, mode in modes.items() if mode == 0o750} == {"ca", "tls"}
    assert {name for name, mode in modes.items() if mode == 0o640} == {
        *("ca/ledger.jsonl", "revoked_tokens.jsonl", "token_keys.jsonl", "node_names.jsonl")
    }
    assert {name for name, mode in modes.items() if mode == 0o600} == {
        *("ca/previous.key", "ca/root.key", "ca/server-root.key", "ca/server-previous.key", "token.key"),
        *("tls/relay.key", "tls/server.key", "join_tokens.jsonl", "marks/marks.sqlite3"),
    }
    assert {name for name, mode in modes.items() if mode == 0o700} == {"marks"}
    assert all(name.endswith(".pem") for name, mode in modes.items() if mode == 0o644)


def test_every_part_of_the_state_is_either_saved_or_made_anew() -> None:
    tokens = {"token_key", "token_keys", "join_tokens", "issued_tokens", "revoked_tokens"}
    saved = {
        "ca",
        *tokens,
        "node_names",
        "people",
        "grants",
        "redemptions",
        "settings",
        "own_tls",
        "broker_client_tls",
        "cluster_tls",
        "cluster_seal",
        "marks",
    }
    made_anew = {"broker", "broker_tls", "audit", "audit_verified"}
    # A part that is new must be put on one of the sides, and into ``save`` if it is the first.
    assert set(vars(StateFiles(Path("state")))) == {"root"} | saved | made_anew


def test_what_a_relay_of_an_earlier_version_remembers_of_its_nodes_is_saved(
    used: StateFiles, empty: StateFiles
) -> None:
    (used.marks / "marks.sqlite3").rename(used.root / "marks.sqlite3")
    restore(save(used, authority(used), NOW_MS), empty)
    assert list(MarkStore(empty.marks, LOG).load()) == [(NODE_ID, "acme", MARK)]


def test_a_new_ca_is_saved_before_any_relay_ran(tmp_path: Path, empty: StateFiles) -> None:
    state = StateFiles(tmp_path / "new")
    authority(state).create()
    restore(save(state, authority(state), NOW_MS), empty)
    assert content(empty) == content(state)
    assert authority(empty).can_issue()


@pytest.mark.parametrize("missing", ["root.key", "root.pem", "ledger.jsonl"])
def test_half_a_ca_is_not_saved(used: StateFiles, missing: str) -> None:
    (used.ca / missing).unlink()
    (used.ca / "next.key").unlink(missing_ok=True)
    with pytest.raises(AuthorityError):
        save(used, authority(used), NOW_MS)


def test_what_is_behind_a_link_is_not_saved(used: StateFiles, tmp_path: Path) -> None:
    used.token_key.rename(tmp_path / "elsewhere")
    used.token_key.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UntrustedFileError, match="symbolic link"):
        save(used, authority(used), NOW_MS)


# --- what is not restored -----------------------------------------------------------------------------


@pytest.mark.parametrize("there", ["file", "directory", "link"])
def test_nothing_is_restored_over_anything(used: StateFiles, empty: StateFiles, there: str) -> None:
    archive = save(used, authority(used), NOW_MS)
    make_private_directory(empty.root)
    place = empty.root / "ca"
    match there:
        case "file":
            place.write_text("untouched")
        case "directory":
            place.mkdir()
        case _:
            place.symlink_to(used.ca)
    with pytest.raises(RestoreError, match="not empty"):
        restore(archive, empty)
    assert [path.name for path in empty.root.iterdir()] == ["ca"]


@pytest.mark.parametrize("missing", ["ca/root.pem", "ca/root.key", "ca/ledger.jsonl"])
def test_a_backup_without_a_part_of_the_ca_is_not_restored(empty: StateFiles, missing: str) -> None:
    files = dict.fromkeys(["ca/root.pem", "ca/root.key", "ca/ledger.jsonl", "token.key"], b"")
    del files[missing]
    with pytest.raises(RestoreError, match=missing):
        restore(pack(files, NOW_MS), empty)
    assert not empty.root.exists()


@pytest.mark.parametrize("name", ["../escaped", "audit.jsonl", "ca/root.pem/x", "kubelet.json"])
def test_a_name_that_no_backup_holds_is_not_restored(empty: StateFiles, tmp_path: Path, name: str) -> None:
    files = dict.fromkeys(["ca/root.pem", "ca/root.key", "ca/ledger.jsonl", name], b"")
    with pytest.raises(ArchiveError, match="no part of a backup"):
        restore(pack(files, NOW_MS), empty)
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_leaves_nothing_and_it_can_be_tried_again(used: StateFiles, empty: StateFiles) -> None:
    archive = save(used, authority(used), NOW_MS)
    make_private_directory(empty.root)
    with full_disk(5000), pytest.raises(OSError, match="File too large"):
        restore(archive, empty)
    assert list(empty.root.iterdir()) == []
    restore(archive, empty)


# --- the file -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("there", ["file", "link", "link to nowhere", "directory"])
def test_what_is_there_is_never_overwritten(tmp_path: Path, there: str) -> None:
    archive, other = tmp_path / "backup", tmp_path / "other"
    match there:
        case "file":
            archive.write_text("an older archive")
        case "link":
            other.write_text("an older archive")
            archive.symlink_to(other)
        case "link to nowhere":
            archive.symlink_to(other)
        case _:
            archive.mkdir()
    before = sorted(tmp_path.iterdir())
    with pytest.raises(FileExistsError), new_file(archive):
        pytest.fail("nothing is made for it")
    assert sorted(tmp_path.iterdir()) == before
    if there in {"file", "link"}:
        assert archive.read_text() == "an older archive"


def test_a_backup_that_cannot_be_made_leaves_no_certificate(relay: Relay, tmp_path: Path) -> None:
    (tmp_path / "there").touch()
    for file in (tmp_path / "there", tmp_path / "nowhere" / "file"):
        assert relay("ca", "backup", file, "--plain", "--without-ca-key").code == 3
    assert '"serve"' not in (tmp_path / "state" / "ca" / "ledger.jsonl").read_text()


def test_a_recipient_that_is_none_leaves_no_certificate(relay: Relay, tmp_path: Path) -> None:
    ledger = tmp_path / "state" / "ca" / "ledger.jsonl"
    before = ledger.read_bytes()
    made = relay("ca", "backup", tmp_path / "backup", "--without-ca-key", "--recipient", "age1no")
    assert made.code == 2
    assert ledger.read_bytes() == before


def test_a_full_disk_leaves_no_half_archive(tmp_path: Path) -> None:
    archive = tmp_path / "backup"
    with full_disk(100), pytest.raises(OSError, match="backup"), new_file(archive) as file:
        file.write(bytes(1000))
    assert not archive.exists()
    with new_file(archive) as file:
        file.write(bytes(1000))
    assert stat.S_IMODE(archive.stat().st_mode) == 0o600


def test_an_archive_that_is_interrupted_is_taken_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(_: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("os.fsync", interrupted)
    with pytest.raises(KeyboardInterrupt), new_file(tmp_path / "backup") as file:
        file.write(b"data")
    assert not (tmp_path / "backup").exists()


URL = "https://relay.example"
KEPT = KeptSettings(URL, tenant="acme", own_broker="mqtts://0.0.0.0:8883")


def saved(state: StateFiles, kept: KeptSettings = KEPT) -> bytes:
    return save_for_another_relay(state, authority(state), kept, NOW_MS, os.urandom)


def test_no_key_by_which_anything_is_issued_leaves_the_relay(used: StateFiles, tmp_path: Path) -> None:
    archive = saved(used)
    for secret in (*used.ca.glob("*.key"), used.token_key, used.join_tokens, used.own_tls.key):
        assert secret.read_bytes() not in archive
    other = StateFiles(tmp_path / "other")
    assert not restore(archive, other)
    assert not authority(other).can_issue()
    assert not list(other.ca.glob("*.key"))
    assert not other.token_key.exists()
    assert not other.join_tokens.exists()


def test_the_other_relay_knows_the_fleet_as_this_one_does(used: StateFiles, tmp_path: Path) -> None:
    other, ours = StateFiles(tmp_path / "other"), authority(used)
    restore(saved(used), other)
    theirs = authority(other)
    assert (theirs.roots(), theirs.servers.roots()) == (ours.roots(), ours.servers.roots())
    assert theirs.in_force().keys() == {NODE_ID}
    assert theirs.records().issued.keys() == ours.records().issued.keys()  # also of its own certificates
    keys = TokenKeys(other.token_keys, theirs, FakeClock(NOW_MS)).accepted()
    assert keys.keys() == {key_id(bytes(read_key(used.token_key).verify_key))}
    assert read_kept(other.settings) == KeptSettings(URL, "mqtts://relay.example:8883", tenant="acme")
    servers = certificates_in("".join(theirs.servers.roots()))
    for root in theirs.roots():
        assert are_endorsed(servers, certificates_in(root), theirs.server_roots().endorsements)


def test_the_other_relay_gets_keys_of_its_own_for_the_same_names(used: StateFiles) -> None:
    files = unpack(saved(used), {*_names(used), *_names(used, ".key")})
    for name in ("server", "relay", "cluster"):
        certificate = load_pem_x509_certificate(files[f"tls/{name}.pem"])
        key = load_pem_private_key(files[f"tls/{name}.key"], None)
        assert certificate.public_key() == key.public_key()
    served = files["tls/server.pem"].decode()
    assert any(issued_by(served, root) for root in authority(used).servers.roots())


def _names(used: StateFiles, suffix: str = "") -> set[str]:
    """Return every name that an archive may have."""
    here = {str(path.relative_to(used.root)) for path in used.root.rglob("*") if path.is_file()}
    made = {f"tls/{name}{suffix}" for name in ("server", "relay", "cluster")}
    return here | made | {"settings.json", "ca/server-endorsements", "tls/cluster.pem"}


def test_what_this_relay_does_not_serve_with_the_other_one_does_not_get(
    used: StateFiles, tmp_path: Path
) -> None:
    used.own_tls.certificate.unlink()
    used.broker_client_tls.certificate.unlink()
    other = StateFiles(tmp_path / "other")
    restore(saved(used), other)
    # But what it proves with which relay it is: that never comes by another way.
    assert {path.name for path in other.own_tls.key.parent.iterdir()} == {"cluster.key", "cluster.pem"}


def test_each_other_relay_has_a_name_of_its_own(used: StateFiles, tmp_path: Path) -> None:
    names = set()
    for number in range(2):
        other = StateFiles(tmp_path / f"other-{number}")
        restore(saved(used), other)
        (der,) = certificates_in(other.cluster_tls.certificate.read_text())
        proven = verify_relay(der, authority(used).roots(), NOW_MS)
        assert proven.public_key == bytes(read_key(other.cluster_tls.key).verify_key)
        assert mode(other.cluster_tls.key) == 0o600
        names.add(proven.name)
    assert len(names) == 2


def test_a_relay_without_the_key_can_save_for_no_other(used: StateFiles, tmp_path: Path) -> None:
    used.own_tls.certificate.unlink()
    other = StateFiles(tmp_path / "other")
    restore(saved(used), other)
    with pytest.raises(AuthorityStateError, match="is not here: do this at the relay with the CA"):
        saved(other)


def test_a_backup_that_lost_its_key_is_not_taken_for_one_of_another_relay(
    used: StateFiles, tmp_path: Path
) -> None:
    whole = save(used, authority(used), NOW_MS)
    files = unpack(whole, _names(used))
    del files["ca/root.key"]
    with pytest.raises(RestoreError, match=r"root\.key"):
        restore(pack(files, NOW_MS), StateFiles(tmp_path / "other"))
