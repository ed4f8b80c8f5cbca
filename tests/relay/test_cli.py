import json
import stat
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from relay.app import bind
from relay.auth import key_id, load_or_create_token_key
from relay.cli import main
from relay.processes import free_port
from schemas.addresses import HostPort
from schemas.certificates import make_csr, verify_leaf
from schemas.identity_files import IdentityFiles
from schemas.keys import from_base64url
from schemas.registry import SchemaRegistry
from schemas.tokens import AGENT_REF, TokenVerifier
from tests.fakes.signer import NODE_ID, key_named

CSR = make_csr(key_named("the node"), NODE_ID)


@dataclass(frozen=True)
class Outcome:
    code: int
    out: str
    err: str

    @property
    def error(self) -> str:
        """The one line that an error is, and nothing besides."""
        assert self.out == ""
        assert self.err.startswith("relay: ")
        assert self.err.count("\n") == 1
        return self.err.strip()


Relay = Callable[..., Outcome]


@pytest.fixture
def state(tmp_path: Path) -> Path:
    return tmp_path / "state"


@pytest.fixture
def relay(state: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Relay:
    """Run the command line in this process; its state lies in a directory of the test's own."""

    def run(*arguments: object) -> Outcome:
        texts = [str(argument).replace(FREE_PORT, str(free_port(0))) for argument in arguments]
        monkeypatch.setattr(sys, "argv", ["relay", *texts, "--state-dir", str(state)])
        with pytest.raises(SystemExit) as ended:
            main()
        captured = capsys.readouterr()
        return Outcome(int(ended.value.code or 0), captured.out, captured.err)

    return run


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
    assert (outcome.code, outcome.out, outcome.err) == (0, f"{state}/ca/root.pem\n", "")
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
    assert "root.pem" in outcome.err
    assert (tmp_path / "leaf.pem").read_text().startswith("-----BEGIN CERTIFICATE-----")


def test_ca_issue_replaces_only_when_it_is_told(relay: Relay, csr: Path) -> None:
    relay("ca", "init")
    assert relay("ca", "issue", csr).code == 0
    refused = relay("ca", "issue", csr)
    assert refused.code == 3
    assert "--replace" in refused.error
    assert relay("ca", "issue", csr, "--replace").code == 0


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


# --- tokens -------------------------------------------------------------------------------------------


def test_token_issue_prints_the_token_and_nothing_else(
    relay: Relay, state: Path, registry: SchemaRegistry
) -> None:
    outcome = relay(
        *("token", "issue", "--sub", "agent-1", "--tenant", "acme", "--ttl", "2h"),
        *("--scope", "tools:call:read_only", "--scope", "sessions:message"),
        *("--public-url", "https://relay.example/"),
    )
    assert (outcome.code, outcome.err) == (0, "")
    token = outcome.out.removesuffix("\n")
    assert token.count(".") == 2
    assert mode(state / "token.key") == 0o600
    public_key = bytes(load_or_create_token_key(state / "token.key").verify_key)
    claims = TokenVerifier(registry, AGENT_REF).verify(
        token,
        {key_id(public_key): public_key}.get,
        audience="https://relay.example/mcp",
        now_s=now_ms(state / "token.key") // 1000,
    )
    assert (claims["iss"], claims["sub"], claims["tenant"]) == ("https://relay.example", "agent-1", "acme")
    assert claims["scope"] == "tools:call:read_only sessions:message"
    assert claims["exp"] - claims["iat"] == 7200


def test_a_token_allows_reading_and_nothing_more_unless_told(relay: Relay) -> None:
    token = relay("token", "issue", "--sub", "agent-1").out
    claims = token.split(".")[1]
    assert json.loads(from_base64url(claims))["scope"] == "tools:call:read_only"


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        pytest.param(["--scope", "root\x1b[31m"], "root\\x1b[31m", id="no such scope"),
        pytest.param(["--ttl", "1w"], "1w", id="no duration"),
        pytest.param(["--ttl", "0s"], "0s", id="no time at all"),
        pytest.param(["--ttl", "-1s"], "-1s", id="time that has passed"),
        pytest.param(["--tenant", "Not A Tenant"], "--tenant", id="no tenant"),
        pytest.param(["--sub", ""], "--sub", id="nobody"),
        pytest.param(["--public-url", "ftp://relay.example"], "ftp://relay.example", id="no URL of a relay"),
        pytest.param(["--public-url", "https://u:p@relay.example"], "relay.example", id="credentials"),
    ],
)
def test_a_token_that_cannot_be_is_a_wrong_command_line(
    relay: Relay, arguments: list[str], word: str
) -> None:
    outcome = relay("token", "issue", "--sub", "agent-1", *arguments)
    assert outcome.code == 2
    assert word in outcome.error
    assert outcome.error.isprintable()


# --- what is wrong with things as they are ------------------------------------------------------------

FREE_PORT = "FREE_PORT"
RUN = ["run", "--broker", "127.0.0.1:1", "--listen", f"127.0.0.1:{FREE_PORT}"]


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        pytest.param(RUN, "relay ca init", id="run without a CA"),
        pytest.param(["ca", "issue", "--mock", "1", "--out", "/nowhere"], "relay ca init", id="no CA"),
        pytest.param(["ca", "issue", "/nowhere/node.csr"], "/nowhere/node.csr", id="no such file"),
    ],
)
def test_what_is_missing_is_said_in_one_line(relay: Relay, arguments: list[str], word: str) -> None:
    outcome = relay(*arguments)
    assert outcome.code == 3
    assert word in outcome.error


@pytest.mark.parametrize(
    ("name", "content", "arguments"),
    [
        pytest.param("marks.sqlite3", b"no database" * 100, RUN, id="marks"),
        pytest.param("token.key", b"no key", RUN, id="token key"),
        pytest.param("token.key", b"\xff", ["token", "issue", "--sub", "x"], id="token key, issuing"),
        pytest.param("ca/root.pem", b"no root", RUN, id="root"),
        pytest.param("ca/ledger.jsonl", b'{"action":"rev', RUN, id="ledger"),
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
    damaged.touch(mode=0o600)
    damaged.write_bytes(content)
    outcome = relay(*arguments)
    assert outcome.code == 3
    assert damaged.name in outcome.error
    assert damaged.read_bytes() == content


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


# --- what is wrong with the command line --------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        pytest.param(["run", "--broker", "nowhere"], "nowhere", id="no port"),
        pytest.param(["run", "--broker", "127.0.0.1:99999"], "99999", id="no such port"),
        pytest.param([*RUN, "--listen", "8700"], "8700", id="no host"),
        pytest.param([*RUN, "--listen", "0.0.0.0:8700"], "TLS proxy", id="open to others"),
        pytest.param([*RUN, "--listen", "192.0.2.1:8700"], "TLS proxy", id="another address"),
        pytest.param([*RUN, "--public-url", "relay.example"], "relay.example", id="no URL"),
        pytest.param([*RUN, "--public-url", "https://relay.example/x"], "relay.example/x", id="a path"),
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
        pytest.param(["run"], id="a missing option"),
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


def test_the_module_is_the_same_command(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "relay", "run", "--broker", "x", "--state-dir", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("relay: ")
    assert done.stderr.count("\n") == 1
