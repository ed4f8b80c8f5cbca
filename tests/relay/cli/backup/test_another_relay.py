"""What another relay of the fleet starts with: nothing by which it could issue, and all else."""

import os
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.serialization import load_pem_private_key
from cryptography.x509 import load_pem_x509_certificate

from relay.cli.backup.another_relay import save_for_another_relay
from relay.cli.backup.archive import pack, unpack
from relay.cli.backup.state import RestoreError, restore, save
from relay.pki.authority import CertificateAuthority
from relay.pki.errors import AuthorityStateError
from relay.pki.relay_tls import issued_by
from relay.settings.config import StateFiles
from relay.settings.kept import KeptSettings, read_kept
from relay.state.join_tokens import JoinTokens
from relay.state.key_files import load_or_create_key, read_key
from relay.state.names import NameLedger
from relay.state.tokens import TokenKeys, key_id
from schemas.certificates import make_csr
from schemas.endorsement import are_endorsed
from schemas.files import make_private_directory, write_atomic
from schemas.identity import certificates_in
from tests.fakes.clock import FakeClock
from tests.fakes.signer import NODE_ID, NOW_MS, key_named

URL = "https://relay.example"
KEPT = KeptSettings(URL, tenant="acme", own_broker="mqtts://0.0.0.0:8883")


def authority(state: StateFiles) -> CertificateAuthority:
    return CertificateAuthority(state.ca, FakeClock(NOW_MS), os.urandom)


@pytest.fixture
def used(tmp_path: Path) -> StateFiles:
    """Return the state of a relay that serves with a certificate of its CA, and shows one to a broker."""
    state = StateFiles(tmp_path / "used")
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
    keys = TokenKeys(other.token_keys, theirs, FakeClock(NOW_MS)).accepted()
    assert keys.keys() == {key_id(bytes(read_key(used.token_key).verify_key))}
    assert read_kept(other.settings) == KeptSettings(URL, "mqtts://relay.example:8883", tenant="acme")
    servers = certificates_in("".join(theirs.servers.roots()))
    for root in theirs.roots():
        assert are_endorsed(servers, certificates_in(root), theirs.server_roots().endorsements)


def test_the_other_relay_gets_keys_of_its_own_for_the_same_names(used: StateFiles) -> None:
    files = unpack(saved(used), {*_names(used), *_names(used, ".key")})
    for name in ("server", "relay"):
        certificate = load_pem_x509_certificate(files[f"tls/{name}.pem"])
        key = load_pem_private_key(files[f"tls/{name}.key"], None)
        assert certificate.public_key() == key.public_key()
    served = files["tls/server.pem"].decode()
    assert any(issued_by(served, root) for root in authority(used).servers.roots())


def _names(used: StateFiles, suffix: str = "") -> set[str]:
    """Return every name that an archive may have."""
    here = {str(path.relative_to(used.root)) for path in used.root.rglob("*") if path.is_file()}
    return here | {"settings.json", "ca/server-endorsements", f"tls/server{suffix}", f"tls/relay{suffix}"}


def test_what_this_relay_does_not_serve_with_the_other_one_does_not_get(
    used: StateFiles, tmp_path: Path
) -> None:
    used.own_tls.certificate.unlink()
    used.broker_client_tls.certificate.unlink()
    other = StateFiles(tmp_path / "other")
    restore(saved(used), other)
    assert not other.own_tls.key.parent.exists()


def test_a_relay_without_the_key_can_save_for_no_other(used: StateFiles, tmp_path: Path) -> None:
    used.own_tls.certificate.unlink()
    other = StateFiles(tmp_path / "other")
    restore(saved(used), other)
    with pytest.raises(AuthorityStateError, match="is not the key of its root"):
        saved(other)


def test_a_backup_that_lost_its_key_is_not_taken_for_one_of_another_relay(
    used: StateFiles, tmp_path: Path
) -> None:
    whole = save(used, authority(used), NOW_MS)
    files = unpack(whole, _names(used))
    del files["ca/root.key"]
    with pytest.raises(RestoreError, match=r"root\.key"):
        restore(pack(files, NOW_MS), StateFiles(tmp_path / "other"))
