import os
import ssl
import stat
from pathlib import Path

import pytest

from relay.pki.authority import CertificateAuthority
from relay.pki.errors import AuthorityError
from relay.pki.server_files import issue_server_files
from relay.state.key_files import KeyFileError
from schemas.files import ExposedFileError
from tests.fakes.clock import FakeClock
from tests.fakes.signer import NODE_ID, NOW_MS


@pytest.fixture
def ca(tmp_path: Path) -> CertificateAuthority:
    ca = CertificateAuthority(tmp_path / "ca", FakeClock(NOW_MS), os.urandom)
    ca.create()
    return ca


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


@pytest.mark.parametrize("content", [b"", b"no key", b"\xff"])
def test_a_damaged_key_is_not_overwritten(ca: CertificateAuthority, tmp_path: Path, content: bytes) -> None:
    key = tmp_path / "server.key"
    key.touch(mode=0o600)
    key.write_bytes(content)
    with pytest.raises(KeyFileError, match=r"server\.key is damaged"):
        issue_server_files(ca, ["mqtt.example"], tmp_path, os.urandom)
    assert key.read_bytes() == content


def test_a_key_that_others_can_read_gets_no_certificate(ca: CertificateAuthority, tmp_path: Path) -> None:
    issue_server_files(ca, ["mqtt.example"], tmp_path, os.urandom)
    (tmp_path / "server.key").chmod(0o644)
    with pytest.raises(ExposedFileError, match=r"server\.key"):
        issue_server_files(ca, ["mqtt.example"], tmp_path, os.urandom)


def test_a_node_is_no_server(ca: CertificateAuthority, tmp_path: Path) -> None:
    with pytest.raises(AuthorityError, match="nothing else can have it"):
        issue_server_files(ca, [NODE_ID], tmp_path / "out", os.urandom)
    assert not (tmp_path / "out" / "server.pem").exists()
