"""What the relay's commands refuse: things as they are, and wrong command lines, in one line each."""

from pathlib import Path

import pytest

from relay.http.listener import bind
from schemas.addresses import HostPort
from schemas.files import make_private_directory
from tests.fakes.command_lines import RUN
from tests.fakes.relay_command import RelayCommand as Relay
from tests.fakes.signer import NODE_ID


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
def test_what_is_missing_is_said_in_one_line(bare: Relay, arguments: list[str], word: str) -> None:
    outcome = bare(*arguments)
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
    relay("token", "issue", "--sub", "x")
    (state / name).chmod(0o644)
    outcome = relay(*arguments)
    assert outcome.code == 3
    assert f"chmod 600 {state / name}" in outcome.error


@pytest.mark.integration
def test_a_port_that_is_taken_is_said_in_one_line(relay: Relay) -> None:
    with bind(HostPort("127.0.0.1", 0)) as taken:
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        outcome = relay(*RUN, "--listen", address)
    assert outcome.code == 3
    assert f"cannot listen on {address}" in outcome.error


def test_a_state_directory_that_is_none_is_said_in_one_line(bare: Relay, state: Path) -> None:
    state.write_text("a file")
    outcome = bare("ca", "init")
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
    files = {"PEM": tmp_path / "relay.pem", "KEY": tmp_path / "relay.key"}
    for path, content in zip(files.values(), (pem, key), strict=True):
        if content is not None:
            path.write_text(content)
            path.chmod(mode)
    outcome = relay(*(files.get(argument, argument) for argument in TLS))
    assert outcome.code == 3
    assert word in outcome.error


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
def test_what_the_parser_refuses_is_a_wrong_command_line(bare: Relay, arguments: list[str]) -> None:
    outcome = bare(*arguments)
    assert (outcome.code, outcome.out) == (2, "")
    assert "Traceback" not in outcome.err
