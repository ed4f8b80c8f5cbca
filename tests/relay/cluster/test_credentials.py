import os
import re
from pathlib import Path

import pytest

from relay.cli.demo.more_relays import new_credentials
from relay.cluster.credentials import CredentialsError, read_credentials
from relay.settings.config import ClusterConfig, ClusterServer
from schemas.files import PRIVATE, PUBLIC, write_atomic
from tests.fakes.cluster_server import TlsNatsServer


def configured(file: Path, *, tls: bool = False, root: Path | None = None) -> ClusterConfig:
    return ClusterConfig((ClusterServer("127.0.0.1", 4222, tls=tls),), file, root, "main")


def test_a_seed_is_a_secret_of_its_own_and_needs_no_tls_on_this_machine(tmp_path: Path) -> None:
    seed, _ = new_credentials(os.urandom)
    write_atomic(file := tmp_path / "seed", seed + "\n", PRIVATE)
    credentials = read_credentials(configured(file))
    assert (credentials.seed, credentials.tls) == (seed, None)
    assert seed not in repr(credentials)
    assert read_credentials(configured(file, tls=True)).tls is not None


@pytest.mark.parametrize("text", ["", "SU", "SUAAAAAAAAAA", "U" * 58, "no seed at all"])
def test_what_is_no_seed_is_refused_without_a_byte_of_it(tmp_path: Path, text: str) -> None:
    write_atomic(file := tmp_path / "seed", text, PRIVATE)
    with pytest.raises(CredentialsError) as refused:
        read_credentials(configured(file))
    assert text == "" or text not in str(refused.value).removeprefix(str(file))


def test_credentials_that_others_can_read_are_not_used(tmp_path: Path) -> None:
    seed, _ = new_credentials(os.urandom)
    write_atomic(file := tmp_path / "seed", seed, PUBLIC)
    with pytest.raises(
        CredentialsError, match=f"^--cluster-credentials: .*chmod 600 {re.escape(str(file))}$"
    ):
        read_credentials(configured(file))


@pytest.mark.parametrize("content", [b"\xff\xfe", b"-----BEGIN CERTIFICATE-----\n\xff"])
def test_a_file_that_is_no_text_is_refused_without_a_byte_of_it(tmp_path: Path, content: bytes) -> None:
    write_atomic(file := tmp_path / "key.der", content, PRIVATE)
    with pytest.raises(CredentialsError, match=r"^--cluster-credentials: .* holds neither") as refused:
        read_credentials(configured(file))
    assert refused.value.__context__ is None


def test_a_certificate_without_its_key_is_refused_with_the_option(tmp_path: Path) -> None:
    server = TlsNatsServer(tmp_path)
    write_atomic(file := tmp_path / "alone.pem", server.root.read_text("ascii"), PRIVATE)
    with pytest.raises(
        CredentialsError, match=r"^--cluster-credentials: .*are not a certificate and its key"
    ):
        read_credentials(configured(file))


def test_a_certificate_with_its_key_is_shown_over_tls(tmp_path: Path) -> None:
    server = TlsNatsServer(tmp_path)
    credentials = read_credentials(configured(server.credentials, root=server.root))
    assert credentials.seed is None
    assert credentials.tls is not None


def test_a_root_that_holds_no_certificate_is_refused(tmp_path: Path) -> None:
    server = TlsNatsServer(tmp_path)
    write_atomic(root := tmp_path / "nothing.pem", "nothing")
    with pytest.raises(
        CredentialsError, match=f"^--cluster-root: {re.escape(str(root))} holds no certificate"
    ):
        read_credentials(configured(server.credentials, root=root))
    with pytest.raises(CredentialsError, match=r"^--cluster-root: .*/missing: No such file or directory$"):
        read_credentials(configured(server.credentials, root=tmp_path / "missing"))
