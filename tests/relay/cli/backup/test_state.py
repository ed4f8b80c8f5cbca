"""A relay's state is saved, and an empty directory becomes that relay again."""

import asyncio
import os
import stat
from contextlib import suppress
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.serialization import load_pem_private_key
from cryptography.x509 import load_pem_x509_certificate

from relay.cli.backup.archive import ArchiveError, pack, unpack
from relay.cli.backup.state import RestoreError, restore, save, save_for_another_relay, write_new
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
from schemas.certificates import make_csr
from schemas.endorsement import are_endorsed
from schemas.files import UntrustedFileError, make_private_directory, write_atomic
from schemas.identity import certificates_in
from schemas.process.logs import make_logger
from schemas.trust import Mark
from tests.fakes.clock import FakeClock
from tests.fakes.disk import full_disk
from tests.fakes.lines import LogLines
from tests.fakes.signer import NODE_ID, NOW_MS, key_named

CSR = make_csr(key_named("the node"), NODE_ID)
LOG = make_logger("relay", LogLines())
MARK = Mark(NOW_MS, "aa" * 32)


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
    join_tokens(state).create("acme", 3600, 1, ca.root_pem())
    load_or_create_key(state.token_key, os.urandom)
    RevokedTokens(state.revoked_tokens).revoke("a-token", NOW_MS)
    NameLedger(state.node_names, FakeClock(NOW_MS)).label(NODE_ID, "acme", "greenhouse pi")
    make_private_directory(state.own_tls.key.parent)
    write_atomic(state.own_tls.key, "key", 0o600)
    write_atomic(state.own_tls.certificate, "certificate")
    write_atomic(state.broker_client_tls.key, "another key", 0o600)
    write_atomic(state.broker_client_tls.certificate, "another certificate")
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
        *("ca/ledger.jsonl", "revoked_tokens.jsonl", "node_names.jsonl")
    }
    assert {name for name, mode in modes.items() if mode == 0o600} == {
        *("ca/previous.key", "ca/root.key", "ca/server-root.key", "token.key"),
        *("tls/relay.key", "tls/server.key", "join_tokens.jsonl", "marks/marks.sqlite3"),
    }
    assert {name for name, mode in modes.items() if mode == 0o700} == {"marks"}
    assert all(name.endswith(".pem") for name, mode in modes.items() if mode == 0o644)


def test_every_part_of_the_state_is_either_saved_or_made_anew() -> None:
    tokens = {"token_key", "token_keys", "join_tokens", "issued_tokens", "revoked_tokens"}
    saved = {"ca", *tokens, "node_names", "settings", "own_tls", "broker_client_tls", "marks"}
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
    with pytest.raises(FileExistsError):
        write_new(archive, b"data")
    assert sorted(tmp_path.iterdir()) == before
    if there in {"file", "link"}:
        assert archive.read_text() == "an older archive"


def test_a_full_disk_leaves_no_half_archive(tmp_path: Path) -> None:
    archive = tmp_path / "backup"
    with full_disk(100), pytest.raises(OSError, match="backup"):
        write_new(archive, bytes(1000))
    assert not archive.exists()
    write_new(archive, bytes(1000))
    assert stat.S_IMODE(archive.stat().st_mode) == 0o600


def test_an_archive_that_is_interrupted_is_taken_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(_: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("os.fsync", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_new(tmp_path / "backup", b"data")
    assert not (tmp_path / "backup").exists()


URL = "https://relay.example"
KEPT = KeptSettings(URL, tenant="acme", own_broker="mqtts://0.0.0.0:8883")


@pytest.fixture
def first(tmp_path: Path) -> StateFiles:
    """Return the state of a relay that serves with a certificate of its CA, and shows one to a broker."""
    state = StateFiles(tmp_path / "first")
    ca = authority(state)
    ca.create()
    ca.issue(make_csr(key_named("the node"), NODE_ID), "acme")
    ca.rotate_root()
    ca.servers.rotate()
    JoinTokens(state.join_tokens, FakeClock(NOW_MS), os.urandom).create("acme", 3600, 1, ca.root_pem())
    key = load_or_create_key(state.token_key, os.urandom)
    TokenKeys(state.token_keys, ca, FakeClock(NOW_MS)).add(bytes(key.verify_key), NOW_MS)
    NameLedger(state.node_names, FakeClock(NOW_MS)).label(NODE_ID, "acme", "greenhouse pi")
    make_private_directory(state.own_tls.key.parent)
    for pair in (state.own_tls, state.broker_client_tls):
        write_atomic(pair.key, "the key of this relay", 0o600)
        write_atomic(pair.certificate, "the certificate of this relay")
    return state


def saved(state: StateFiles, kept: KeptSettings = KEPT) -> bytes:
    return save_for_another_relay(state, authority(state), kept, NOW_MS, os.urandom)


def test_no_key_by_which_anything_is_issued_leaves_the_relay(first: StateFiles, tmp_path: Path) -> None:
    archive = saved(first)
    for secret in (*first.ca.glob("*.key"), first.token_key, first.join_tokens, first.own_tls.key):
        assert secret.read_bytes() not in archive
    other = StateFiles(tmp_path / "other")
    assert not restore(archive, other)
    assert not authority(other).can_issue()
    assert not list(other.ca.glob("*.key"))
    assert not other.token_key.exists()
    assert not other.join_tokens.exists()


def test_the_other_relay_knows_the_fleet_as_this_one_does(first: StateFiles, tmp_path: Path) -> None:
    other, ours = StateFiles(tmp_path / "other"), authority(first)
    restore(saved(first), other)
    theirs = authority(other)
    assert (theirs.roots(), theirs.servers.roots()) == (ours.roots(), ours.servers.roots())
    assert theirs.in_force().keys() == {NODE_ID}
    keys = TokenKeys(other.token_keys, theirs, FakeClock(NOW_MS)).accepted()
    assert keys.keys() == {key_id(bytes(read_key(first.token_key).verify_key))}
    assert read_kept(other.settings) == KeptSettings(URL, "mqtts://relay.example:8883", tenant="acme")
    servers = certificates_in("".join(theirs.servers.roots()))
    for root in theirs.roots():
        assert are_endorsed(servers, certificates_in(root), theirs.server_roots().endorsements)


def test_the_other_relay_gets_keys_of_its_own_for_the_same_names(first: StateFiles) -> None:
    files = unpack(saved(first), {*_names(first), *_names(first, ".key")})
    for name in ("server", "relay"):
        certificate = load_pem_x509_certificate(files[f"tls/{name}.pem"])
        key = load_pem_private_key(files[f"tls/{name}.key"], None)
        assert certificate.public_key() == key.public_key()
    served = files["tls/server.pem"].decode()
    assert any(issued_by(served, root) for root in authority(first).servers.roots())


def _names(first: StateFiles, suffix: str = "") -> set[str]:
    """Return every name that an archive may have."""
    here = {str(path.relative_to(first.root)) for path in first.root.rglob("*") if path.is_file()}
    return here | {"settings.json", "ca/server-endorsements", f"tls/server{suffix}", f"tls/relay{suffix}"}


def test_what_this_relay_does_not_serve_with_the_other_one_does_not_get(
    first: StateFiles, tmp_path: Path
) -> None:
    first.own_tls.certificate.unlink()
    first.broker_client_tls.certificate.unlink()
    other = StateFiles(tmp_path / "other")
    restore(saved(first), other)
    assert not other.own_tls.key.parent.exists()


def test_a_relay_without_the_key_can_save_for_no_other(first: StateFiles, tmp_path: Path) -> None:
    first.own_tls.certificate.unlink()
    other = StateFiles(tmp_path / "other")
    restore(saved(first), other)
    with pytest.raises(AuthorityStateError, match="is not the key of its root"):
        saved(other)


def test_a_backup_that_lost_its_key_is_not_taken_for_one_of_another_relay(
    first: StateFiles, tmp_path: Path
) -> None:
    whole = save(first, authority(first), NOW_MS)
    files = unpack(whole, _names(first))
    del files["ca/root.key"]
    with pytest.raises(RestoreError, match=r"root\.key"):
        restore(pack(files, NOW_MS), StateFiles(tmp_path / "other"))
