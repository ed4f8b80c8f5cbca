"""``relay connect`` without a relay: what it refuses, and what it leaves alone.

With a relay and the clients themselves: ``tests/conformance/test_connect.py``.
"""

import asyncio
import gzip
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.fakes.mcp_server import FakeMcpServer
from tests.fakes.ports import unused_port
from tests.fakes.raw_http_server import RawServer, http_answer
from tests.fakes.relay_command import Outcome, run_here

TOKEN = "a.secret.token"
URL = "https://relay.example"


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for variable in ("EDGE_TOKEN", "CODEX_HOME", "CLAUDE_CONFIG_DIR", "XDG_CONFIG_HOME", "XDG_STATE_HOME"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


@pytest.fixture
def token_file(home: Path) -> Path:
    file = home / "token"
    file.write_text(TOKEN)
    file.chmod(0o600)
    return file


Connect = Callable[..., Outcome]


@pytest.fixture
def connect(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Connect:
    """Run the command in this process."""

    def run(*arguments: object) -> Outcome:
        outcome = run_here(monkeypatch, capsys, "connect", *map(str, arguments))
        assert TOKEN not in outcome.out + outcome.err
        return outcome

    return run


def files_below(home: Path) -> set[str]:
    return {path.name for path in home.rglob("*") if path.is_file()}


def test_a_dry_run_shows_the_change_and_writes_nothing(connect: Connect, home: Path) -> None:
    shown = connect("codex", "--url", f"{URL}/mcp", "--dry-run")
    assert shown.code == 0, shown.err
    assert "\n[mcp_servers.edge]\n" in shown.out
    assert "Nothing was written." in shown.out
    assert files_below(home) == set()


@pytest.mark.parametrize(
    ("arguments", "path"),
    [
        (("--url", URL), "/mcp/kinds"),
        (("--url", f"{URL}/mcp"), "/mcp/kinds"),
        (("--url", f"{URL}/mcp/tools"), "/mcp/tools"),
        (("--url", f"{URL}/mcp/tools", "--view", "tools"), "/mcp/tools"),
        (("--url", URL, "--view", "tools"), "/mcp/tools"),
    ],
)
def test_the_client_gets_the_kinds_view_unless_another_is_asked_for(
    connect: Connect, arguments: tuple[str, ...], path: str
) -> None:
    assert f'"url": "{URL}{path}"' in connect("claude-code", *arguments, "--dry-run").out


def test_a_view_and_another_in_the_url_are_a_contradiction(connect: Connect) -> None:
    refused = connect("codex", "--url", f"{URL}/mcp/tools", "--view", "kinds", "--dry-run")
    assert (refused.code, refused.out) == (2, "")
    assert "are not the same view: leave out one of them" in refused.err


SECRET = "sk-of-a-neighbour"
NEIGHBOURS = {
    "claude-code": (
        ".claude.json",
        f'{{"mcpServers":{{"other":{{"env":{{"API_KEY":"{SECRET}"}}}},"edge":{{"headers":"{SECRET}"}}}}}}',
    ),
    "codex": (
        ".codex/config.toml",
        f'[mcp_servers.edge]\nenv = {{ K = "{SECRET}" }}\n[mcp_servers.other]\nargs = ["{SECRET}"]\n',
    ),
}


@pytest.mark.parametrize("client", NEIGHBOURS)
@pytest.mark.parametrize("change", [("--url", URL, "--dry-run"), ("--remove", "--dry-run"), ("--remove",)])
def test_a_change_shows_no_secret_of_the_file(
    connect: Connect, home: Path, client: str, change: tuple[str, ...]
) -> None:
    name, text = NEIGHBOURS[client]
    file = home / name
    file.parent.mkdir(exist_ok=True)
    file.write_text(text)
    shown = connect(client, *change)
    assert shown.code == 0, shown.err
    assert f"{file}: " in shown.out
    assert SECRET not in shown.out + shown.err
    assert ("is taken out" in shown.out) == ("--remove" in change)


@pytest.mark.parametrize("client", ["claude-code", "codex"])
def test_a_relay_that_cannot_be_reached_changes_no_configuration(
    connect: Connect, home: Path, token_file: Path, client: str
) -> None:
    nowhere = f"http://127.0.0.1:{unused_port()}"
    failed = connect(client, "--url", nowhere, "--token-file", token_file)
    assert (failed.code, failed.err) == (3, f"relay: {nowhere} is not reached: Connection refused\n")
    assert files_below(home) == {token_file.name}


@pytest.mark.integration
async def test_a_token_goes_to_no_other_relay_and_is_kept_with_the_change(
    connect: Connect, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = home / ".config" / "edge-kubelet" / "cursor-edge.token"
    (home / ".cursor").mkdir()

    async def connected(url: str, token: str = "") -> Outcome:
        monkeypatch.setenv("EDGE_TOKEN", token)
        options = ("--url", url.removesuffix("/mcp"), "--view", "tools")
        return await asyncio.to_thread(connect, "cursor", *options)

    async with (
        FakeMcpServer(token=TOKEN).over_http() as first,
        FakeMcpServer(token="b").over_http() as second,
    ):
        assert (await connected(first, "wrong")).code == 11
        assert not kept.exists()
        assert (await connected(first, TOKEN)).code == 0
        assert (await connected(first)).code == 0  # by the token that is kept for it
        assert "there is no token" in (await connected(second)).err  # which is not for that one
        assert (await connected(second, "wrong")).code == 11
        assert (kept.read_text().strip(), kept.stat().st_mode & 0o777) == (TOKEN, 0o600)
        assert (await connected(second, "b")).code == 0
    assert [file.name for file in kept.parent.iterdir()] == [kept.name]
    assert kept.read_text().strip() == "b"


def test_what_was_connected_is_taken_out_with_its_token(connect: Connect, home: Path) -> None:
    config = home / ".claude.json"
    config.write_text('{"theme": "dark", "mcpServers": {"edge": {"type": "http"}}}')
    kept = home / ".config" / "edge-kubelet" / "claude-code-edge.token"
    kept.parent.mkdir(parents=True)
    kept.write_text(TOKEN)
    elsewhere = home / "elsewhere.json"
    elsewhere.write_text(config.read_text())
    assert connect("claude-code", "--remove", "--client-config", str(elsewhere)).code == 0
    assert json.loads(elsewhere.read_text()) == {"theme": "dark"}
    assert kept.exists()  # the usual configuration refers to it
    removed = connect("claude-code", "--remove")
    assert removed.code == 0, removed.err
    assert json.loads(config.read_text()) == {"theme": "dark"}
    assert not kept.exists()
    kept.write_text(TOKEN)  # as where the server was taken out by hand
    again = connect("claude-code", "--remove", "--dry-run")
    assert (again.code, "needs no change" in again.out, kept.exists()) == (0, True, True)
    again = connect("claude-code", "--remove")
    assert (again.code, "needs no change" in again.out, kept.exists()) == (0, True, False)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (["codex"], "--url is missing"),
        (["codex", "--url", URL], "there is no token"),
        (["codex", "--url", URL, "--token-file", "/nope"], "/nope: No such file"),
        (["codex", "--url", "http://relay.example"], "not encrypted"),
        (["codex", "--url", URL, "--name", "a b"], "--name takes"),
        (["vscode", "--url", URL, "--dry-run"], "install and start it once"),
    ],
)
def test_what_is_wrong_is_one_line(connect: Connect, home: Path, options: list[str], why: str) -> None:
    refused = connect(*options)
    assert refused.code in {2, 3}
    assert why in refused.error
    assert files_below(home) == set()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root reads what another user's link leads to")
@pytest.mark.integration
@pytest.mark.parametrize("command", [["connect", "claude-code", "--remove"], ["login", "--remove"]])
def test_root_changes_nothing_through_a_link_in_the_home_directory_of_another(
    home: Path, command: list[str]
) -> None:
    """As with ``sudo --preserve-env=HOME``: the copy as it was would be that user's to read."""
    roots, adas = home / "roots", home / "ada"
    adas_own = adas / ".config/edge-kubelet"
    adas_own.mkdir(parents=True)
    roots.mkdir(mode=0o700)
    text = '{"mcpServers": {"edge": {"url": "https://relay.example"}}}'
    for name in ("secret.json", "profile.json"):
        (roots / name).write_text(text)
    (adas / ".claude.json").symlink_to(roots / "secret.json")
    adas_own.rmdir()
    adas_own.symlink_to(roots)
    for path in (adas, adas / ".config", adas / ".claude.json", adas_own):
        os.chown(path, 54_321, 54_321, follow_symlinks=False)
    for above in adas.parents:
        if not above.stat().st_mode & 0o001:
            above.chmod(0o711)  # pytest's own
    ran = subprocess.run(
        [sys.executable, "-P", "-m", "relay", *command],
        env={**os.environ, "HOME": str(adas)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ran.returncode == 3, ran
    assert ran.stderr.endswith(": Permission denied\n")
    assert {file.name: file.read_text() for file in roots.iterdir()} == dict.fromkeys(
        ("secret.json", "profile.json"), text
    )
    assert {file.name for file in adas.iterdir()} == {".claude.json", ".config"}


def test_a_configuration_with_comments_is_left_alone(connect: Connect, home: Path, token_file: Path) -> None:
    config = home / ".config" / "Code" / "User" / "mcp.json"
    config.parent.mkdir(parents=True)
    config.write_text('{\n  // mine\n  "servers": {}\n}')
    refused = connect("vscode", "--url", URL, "--token-file", token_file)
    assert refused.code == 3
    assert "mcp.json is not JSON; comments cannot be kept" in refused.error
    assert "// mine" in config.read_text()


@pytest.mark.integration
def test_what_an_agent_s_laptop_runs_imports_nothing_that_only_linux_has() -> None:
    """Libraries import such modules where the platform has them; ours must not ask for them at all."""
    checked = """
import sys
LINUX = {"fcntl", "grp", "pwd", "resource", "termios", "uvloop", "psutil", "sdnotify"}
class Refusing:
    def find_spec(self, name, path, target=None):
        if name.partition(".")[0] in LINUX:
            asking = sys._getframe(1)
            while "importlib" in asking.f_code.co_filename:
                asking = asking.f_back
            module = asking.f_globals["__name__"]
            assert module.partition(".")[0] not in {"relay", "kubelet", "schemas"}, (module, name)
sys.meta_path.insert(0, Refusing())
import relay.cli.main, relay.cli.connect, relay.client.stdio_bridge.bridge, relay.remote_tools
assert not {"uvloop", "psutil"} & set(sys.modules)
"""
    done = subprocess.run(
        [sys.executable, "-P", "-c", checked],
        capture_output=True,
        encoding="utf-8",
        env={**os.environ, "PYTHONWARNINGS": "ignore"},
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_a_client_that_signs_in_gets_the_url_alone(connect: Connect, home: Path) -> None:
    shown = connect("codex", "--url", URL, "--sign-in", "--dry-run")
    assert shown.code == 0, shown.err
    assert 'url = "https://relay.example/mcp/kinds"' in shown.out
    assert "token" not in shown.out
    assert files_below(home) == set()


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("codex", "--token-file", "token"), "--sign-in needs no --token-file, leave it out"),
        (("codex", "--root", "root.pem"), "--sign-in needs no --root: the client would not trust"),
        (("claude-desktop",), "in its settings, under Connectors"),
    ],
)
def test_what_does_not_go_with_a_sign_in(
    connect: Connect, token_file: Path, arguments: tuple[str, ...], text: str
) -> None:
    refused = connect(*arguments, "--url", URL, "--sign-in", "--dry-run")
    assert text in refused.err
    assert refused.code != 0
    assert token_file.exists()


@pytest.mark.integration
@pytest.mark.parametrize(
    "answer",
    [
        http_answer(200, gzip.compress(b" " * (1 << 24)), **{"Content-Encoding": "gzip"}),
        http_answer(200, b" " * (1 << 17)),
        http_answer(404, b"{}"),
        http_answer(200, b"[]"),
    ],
    ids=["compressed", "long", "absent", "list"],
)
async def test_what_is_no_sign_in_is_read_within_bounds(connect: Connect, home: Path, answer: bytes) -> None:
    async with RawServer.running(answer) as server:
        refused = await asyncio.to_thread(connect, "codex", "--url", server.url, "--sign-in")
    assert "has no sign-in" in refused.err
    assert "accept-encoding: identity" in server.asked[0].head.lower()
    assert files_below(home) == set()


@pytest.mark.integration
def test_a_relay_that_is_not_there_is_named_before_anything_is_written(connect: Connect, home: Path) -> None:
    url = f"http://127.0.0.1:{unused_port()}"
    refused = connect("codex", "--url", url, "--sign-in")
    assert f"{url} is not reached" in refused.err
    assert refused.code != 0
    assert files_below(home) == set()
