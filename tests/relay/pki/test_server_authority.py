"""The root of servers, and the files of a broker or another server."""

import os
import ssl
import stat
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePublicKey

from relay.pki.authority import CertificateAuthority, issue_reader_files, issue_server_files
from relay.pki.errors import AuthorityError, AuthorityOptionError, AuthorityStateError
from relay.pki.issuing import Issuing
from schemas.certificates import IdentityError, are_endorsed, is_server_root, make_csr, verify_leaf
from schemas.identity import certificates_in, first_certificate_in
from schemas.tls import client_context
from tests.fakes.clock import FakeClock
from tests.fakes.server_ca import server_key_named
from tests.fakes.signer import DAY_MS, NODE_ID, NOW_MS, key_named

HOSTS = ["relay.example"]
KEY = server_key_named("a server").public_key()


@pytest.fixture
def old(ca: CertificateAuthority) -> CertificateAuthority:
    """A CA of a version that had no root of servers, and has issued."""
    ca.issue(make_csr(key_named("a node"), NODE_ID), "acme")
    for file in ca.servers.files:
        file.unlink()
    return ca


def read(pem: str) -> list[x509.Certificate]:
    return [x509.load_der_x509_certificate(der) for der in certificates_in(pem)]


def test_a_new_ca_has_a_root_of_servers_which_the_root_of_nodes_certifies(ca: CertificateAuthority) -> None:
    [root] = ca.servers.roots()
    assert is_server_root(first_certificate_in(root))
    assert isinstance(read(root)[0].public_key(), EllipticCurvePublicKey)
    leaf, cross = read(ca.servers.issue("relay", HOSTS, KEY, 90))
    leaf.verify_directly_issued_by(read(root)[0])
    cross.verify_directly_issued_by(read(ca.root_pem())[0])
    for file in ca.servers.files:
        assert stat.S_IMODE(file.stat().st_mode) == (0o600 if file.suffix == ".key" else 0o644)


def test_an_old_ca_gets_one_once_which_the_root_of_nodes_certifies(old: CertificateAuthority) -> None:
    before = old.root_pem()
    with pytest.raises(AuthorityStateError, match="relay ca init"):
        old.servers.roots()
    assert old.add_server_root()
    assert not old.add_server_root()
    assert old.root_pem() == before
    leaf, cross = read(old.servers.issue("relay", HOSTS, KEY, 90))
    [root] = read(old.servers.roots()[0])
    leaf.verify_directly_issued_by(root)
    cross.verify_directly_issued_by(read(before)[0])
    assert cross.public_key() == root.public_key()


def test_while_a_root_of_nodes_is_replaced_the_one_that_every_node_knows_certifies(
    old: CertificateAuthority,
) -> None:
    known = old.root_pem()
    old.rotate_root()
    old.add_server_root()
    _, cross = read(old.servers.issue("relay", HOSTS, KEY, 90))
    cross.verify_directly_issued_by(read(known)[0])


def test_without_the_key_of_the_root_of_nodes_an_old_ca_says_which_is_missing(
    old: CertificateAuthority,
) -> None:
    key = old.root_file.with_name("root.key")
    key.rename(key.with_name("elsewhere"))
    with pytest.raises(AuthorityStateError, match=r"root\.key"):
        old.add_server_root()
    assert not old.servers.exist()
    key.with_name("elsewhere").rename(key)
    assert old.add_server_root()


@pytest.mark.parametrize("cut_at", ["server-cross.pem", "server-root.key", "server-root.pem"])
def test_what_was_cut_short_is_done_the_next_time(
    old: CertificateAuthority, monkeypatch: pytest.MonkeyPatch, cut_at: str
) -> None:
    replace = Path.replace

    def cut(self: Path, target: Path) -> Path:
        if target.name == cut_at:
            raise KeyboardInterrupt
        return replace(self, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", cut)
        with pytest.raises(KeyboardInterrupt):
            old.add_server_root()
    assert not old.servers.exist()
    assert old.add_server_root()
    leaf, cross = read(old.servers.issue("relay", HOSTS, KEY, 90))
    leaf.verify_directly_issued_by(cross)


def test_a_root_of_servers_is_not_overwritten(ca: CertificateAuthority) -> None:
    before = ca.servers.roots()
    with pytest.raises(AuthorityOptionError, match="holds a CA already"):
        ca.create()
    with pytest.raises(AuthorityOptionError, match="holds a CA already"):
        ca.servers.create(Issuing(lambda: NOW_MS, os.urandom).root())
    assert ca.servers.roots() == before


def test_its_old_root_issues_until_its_time_is_up_so_that_who_was_not_told_yet_believes(
    ca: CertificateAuthority, clock: FakeClock
) -> None:
    [first] = ca.servers.roots()
    until_ms = ca.servers.rotate(30)
    assert until_ms == NOW_MS + 30 * DAY_MS
    second, kept = ca.servers.roots()
    assert kept == first
    with pytest.raises(AuthorityOptionError, match="still trusted"):
        ca.servers.rotate()
    read(ca.servers.issue("relay", HOSTS, KEY, 90))[0].verify_directly_issued_by(read(first)[0])
    clock.advance(30 * DAY_MS)
    assert ca.servers.roots() == [second]
    read(ca.servers.issue("relay", HOSTS, KEY, 90))[0].verify_directly_issued_by(read(second)[0])
    assert ca.roots() == [ca.root_pem()]
    assert ca.records().in_force() == {}


def test_the_cross_certificate_is_shown_with_the_root_that_it_certifies_and_no_other(
    old: CertificateAuthority, clock: FakeClock
) -> None:
    old.add_server_root()
    old.servers.rotate(1)
    assert len(read(old.servers.issue("relay", HOSTS, KEY, 90))) == 2
    clock.advance(DAY_MS)
    assert len(read(old.servers.issue("relay", HOSTS, KEY, 90))) == 1


def test_each_root_of_nodes_that_is_trusted_endorses_all_roots_of_servers(
    ca: CertificateAuthority,
) -> None:
    ca.rotate_root()
    ca.servers.rotate()
    known = ca.server_roots()
    assert known.pem == "".join(ca.servers.roots())
    assert len(known.endorsements) == 2
    for root in ca.roots():
        assert are_endorsed(certificates_in(known.pem), certificates_in(root), known.endorsements)


def test_what_the_root_of_servers_signs_is_no_node_s(ca: CertificateAuthority) -> None:
    pem = ca.servers.issue("relay", [NODE_ID], KEY, 90)
    for roots in (ca.roots(), ca.servers.roots()):
        with pytest.raises(IdentityError):
            verify_leaf(pem, roots, NOW_MS)


def test_a_damaged_cross_certificate_is_named(old: CertificateAuthority) -> None:
    old.add_server_root()
    cross = old.root_file.with_name("server-cross.pem")
    cross.write_text("x" * 20_000)
    with pytest.raises(AuthorityStateError, match=r"server-cross\.pem is damaged"):
        old.servers.issue("relay", HOSTS, KEY, 90)


def test_a_server_gets_key_certificate_and_roots(ca: CertificateAuthority, tmp_path: Path) -> None:
    ca.rotate_root()
    out = tmp_path / "etc" / "broker"
    issue_server_files(ca, ["mqtt.example", "127.0.0.1"], out, os.urandom)
    assert sorted(path.name for path in out.iterdir()) == ["roots.pem", "server.key", "server.pem"]
    assert stat.S_IMODE((out / "server.key").stat().st_mode) == 0o600
    assert (out / "roots.pem").read_text() == "".join(ca.roots())
    # That key and certificate belong together is what this checks.
    ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(out / "server.pem", out / "server.key")


def test_another_certificate_is_for_the_same_key(ca: CertificateAuthority, tmp_path: Path) -> None:
    issue_server_files(ca, ["mqtt.example"], tmp_path, os.urandom)
    key, certificate = ((tmp_path / name).read_bytes() for name in ("server.key", "server.pem"))
    issue_server_files(ca, ["mqtt.example"], tmp_path, os.urandom)
    assert (tmp_path / "server.key").read_bytes() == key
    assert (tmp_path / "server.pem").read_bytes() != certificate
    ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(tmp_path / "server.pem", tmp_path / "server.key")


def test_a_server_that_is_reached_under_an_address_is_named_by_it(
    ca: CertificateAuthority, tmp_path: Path
) -> None:
    issue_server_files(ca, ["[::1]"], tmp_path, os.urandom)
    [server] = ca.records().issued.values()
    assert server.name == "::1"


@pytest.mark.holds("RFC-0001/1/agents-subscribe")
def test_a_reader_is_in_force_until_its_last_certificate_is_revoked(
    ca: CertificateAuthority, tmp_path: Path
) -> None:
    assert issue_reader_files(ca, "inventory", tmp_path, os.urandom) == "edge-reader-inventory"
    key = (tmp_path / "reader.key").read_bytes()
    issue_reader_files(ca, "inventory", tmp_path, os.urandom)
    assert (tmp_path / "reader.key").read_bytes() == key
    assert stat.S_IMODE((tmp_path / "reader.key").stat().st_mode) == 0o600
    assert (tmp_path / "roots.pem").read_text() == "".join(ca.servers.roots())
    client_context((tmp_path / "roots.pem").read_text(), (tmp_path / "reader.pem", tmp_path / "reader.key"))
    first, second = ca.records().issued
    ca.revoke(first)
    assert ca.readers() == ["edge-reader-inventory"]
    ca.revoke(second)
    assert ca.readers() == []


@pytest.mark.parametrize("name", ["", "A", "a.b", "a b", "x" * 33, "a\n"])
def test_what_is_no_name_of_a_reader_has_no_certificate(
    ca: CertificateAuthority, tmp_path: Path, name: str
) -> None:
    with pytest.raises(AuthorityError, match="a reader's name is 1 to 32"):
        issue_reader_files(ca, name, tmp_path / "out", os.urandom)
    assert not (tmp_path / "out").exists()
