import socket
import ssl
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import BestAvailableEncryption, Encoding, PrivateFormat

from schemas.files import PRIVATE, write_atomic
from schemas.keys import private_key_to_pem
from schemas.tls import FreshContext, TlsFilesError, client_context, load_chain
from tests.fakes.signer import SimulatedCa, SimulatedNode


@pytest.fixture(scope="module")
def ca() -> SimulatedCa:
    return SimulatedCa()


@pytest.fixture
def node(ca: SimulatedCa) -> SimulatedNode:
    return ca.issue()


def files_of(directory: Path, node: SimulatedNode) -> tuple[Path, Path]:
    certificate, key = directory / "leaf.pem", directory / "node.key"
    certificate.write_text(node.leaf_pem)
    write_atomic(key, private_key_to_pem(node.key), PRIVATE)
    return certificate, key


def test_who_is_connected_to_must_prove_to_be_what_was_asked_for(ca: SimulatedCa) -> None:
    context = client_context(ca.root_pem)
    assert context.verify_mode is ssl.CERT_REQUIRED
    assert context.check_hostname
    assert not context.hostname_checks_common_name
    assert context.minimum_version == ssl.TLSVersion.TLSv1_2


def test_a_root_that_is_named_is_the_only_one(ca: SimulatedCa) -> None:
    other = SimulatedCa("another root")
    for pem, count in ((ca.root_pem, 1), (ca.root_pem + other.root_pem, 2)):
        assert len(client_context(pem).get_ca_certs()) == count


def test_without_a_root_it_is_those_that_the_machine_trusts(
    ca: SimulatedCa, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trusted = tmp_path / "trusted.pem"
    trusted.write_text(ca.root_pem)
    monkeypatch.setenv("SSL_CERT_FILE", str(trusted))
    monkeypatch.setenv("SSL_CERT_DIR", str(tmp_path / "nowhere"))
    assert client_context().get_ca_certs() == client_context(ca.root_pem).get_ca_certs()


BROKEN = "-----BEGIN CERTIFICATE-----\nnone\n-----END CERTIFICATE-----\n"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        pytest.param(None, "No such file or directory", id="missing"),
        pytest.param("no certificate", "holds no certificate", id="without a certificate"),
        pytest.param(
            SimulatedCa().root_pem + BROKEN, "holds no certificate", id="a broken one behind a good"
        ),
    ],
)
def test_roots_of_the_machine_that_cannot_be_read_are_named_with_the_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str | None, said: str
) -> None:
    named = tmp_path / "roots.pem"
    if content is not None:
        named.write_text(content)
    monkeypatch.setenv("SSL_CERT_FILE", str(named))
    with pytest.raises(TlsFilesError, match=f"SSL_CERT_FILE names {named}.*{said}"):
        client_context()


def test_roots_of_the_machine_that_are_not_used_are_not_looked_at(
    ca: SimulatedCa, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", "/nonexistent/roots.pem")
    assert len(client_context(ca.root_pem).get_ca_certs()) == 1


@pytest.mark.parametrize("pem", ["", "no certificate", "r\N{LATIN SMALL LETTER O WITH DIAERESIS}t"])
def test_a_root_that_is_none_is_never_taken_for_the_machines(pem: str) -> None:
    with pytest.raises(TlsFilesError, match="no certificate"):
        client_context(pem)


def test_a_key_of_another_is_refused(node: SimulatedNode, ca: SimulatedCa, tmp_path: Path) -> None:
    certificate, key = files_of(tmp_path, node)
    client_context(ca.root_pem, (certificate, key))
    other = SimulatedCa("another").issue("01hzx9k3m4p7q8r9s0t1v2w3xz")
    write_atomic(key, private_key_to_pem(other.key), PRIVATE)
    with pytest.raises(TlsFilesError, match=r"leaf\.pem and .*node\.key are not a certificate and its key"):
        client_context(ca.root_pem, (certificate, key))


def test_a_locked_key_is_refused_without_a_prompt(node: SimulatedNode, tmp_path: Path) -> None:
    certificate, key = files_of(tmp_path, node)
    locked = Ed25519PrivateKey.from_private_bytes(bytes(node.key)).private_bytes(
        Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"a secret")
    )
    write_atomic(key, locked, PRIVATE)
    with pytest.raises(TlsFilesError):
        load_chain(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), certificate, key)


def test_a_fresh_context_is_made_for_every_connection(ca: SimulatedCa) -> None:
    made: list[ssl.SSLContext] = []

    def make() -> ssl.SSLContext:
        made.append(client_context(ca.root_pem))
        return made[-1]

    context = FreshContext.of(make)
    assert context.check_hostname
    assert made == []
    for _ in range(2):
        one, other = socket.socketpair()
        with (
            one,
            other,
            context.wrap_socket(
                one, server_hostname="relay.example", do_handshake_on_connect=False
            ) as wrapped,
        ):
            assert wrapped.context is made[-1]
    assert len(made) == 2
