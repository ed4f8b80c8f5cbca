import json
import shlex
from pathlib import Path, PurePosixPath

import pytest

from relay.client.connect.clients import (
    CLIENTS,
    ClientName,
    ClientTarget,
    Machine,
    check_name,
    token_directory,
)
from schemas.error_roots import CommandLineError

HOME = Path("/home/ada")
CONNECTION = ClientTarget(
    url="https://relay.example",
    program=Path("/opt/with space/relay"),
    token_file=Path("/home/ada/.config/edge-kubelet/a.token"),
)


def machine(system: str, **environment: str) -> Machine:
    return Machine(system, HOME, environment)


@pytest.mark.parametrize(
    ("client", "system", "environment", "expected"),
    [
        ("claude-code", "linux", {}, "/home/ada/.claude.json"),
        ("claude-code", "darwin", {"CLAUDE_CONFIG_DIR": "/c"}, "/c/.claude.json"),
        ("claude-desktop", "linux", {}, "/home/ada/.config/Claude/claude_desktop_config.json"),
        (
            "claude-desktop",
            "darwin",
            {},
            "/home/ada/Library/Application Support/Claude/claude_desktop_config.json",
        ),
        ("claude-desktop", "win32", {"APPDATA": "/r"}, "/r/Claude/claude_desktop_config.json"),
        ("vscode", "linux", {"XDG_CONFIG_HOME": "/x"}, "/x/Code/User/mcp.json"),
        ("vscode", "darwin", {}, "/home/ada/Library/Application Support/Code/User/mcp.json"),
        ("codex", "linux", {}, "/home/ada/.codex/config.toml"),
        ("codex", "darwin", {"CODEX_HOME": "/c"}, "/c/config.toml"),
        ("cursor", "linux", {}, "/home/ada/.cursor/mcp.json"),
        ("gemini", "darwin", {}, "/home/ada/.gemini/settings.json"),
        ("windsurf", "linux", {}, "/home/ada/.codeium/windsurf/mcp_config.json"),
        ("zed", "linux", {}, "/home/ada/.config/zed/settings.json"),
        ("zed", "linux", {"XDG_CONFIG_HOME": "/x"}, "/x/zed/settings.json"),
        ("zed", "darwin", {}, "/home/ada/.config/zed/settings.json"),
        ("zed", "win32", {"APPDATA": "/r"}, "/r/Zed/settings.json"),
    ],
)
def test_a_configuration_lies_where_its_client_reads_it(
    client: str, system: str, environment: dict[str, str], expected: str
) -> None:
    found = CLIENTS[ClientName(client)].file(machine(system, **environment))
    assert PurePosixPath(found) == PurePosixPath(expected)


@pytest.mark.parametrize("client", ClientName)
@pytest.mark.parametrize("root", [None, Path("/etc/root.pem")])
def test_an_entry_names_the_relay_the_token_s_file_and_the_root(
    client: ClientName, root: Path | None
) -> None:
    entry = CLIENTS[client].entry(
        ClientTarget(CONNECTION.url, CONNECTION.program, CONNECTION.token_file, root=root)
    )
    text = json.dumps(entry)
    assert '"https://relay.example/mcp/kinds"' in text
    assert str(CONNECTION.token_file) in text
    assert ("/etc/root.pem" in text) == (root is not None)


def test_claude_code_reads_the_headers_by_a_command_that_a_shell_splits_rightly() -> None:
    entry = CLIENTS[ClientName.CLAUDE_CODE].entry(CONNECTION)
    assert shlex.split(entry["headersHelper"]) == [
        "/opt/with space/relay",
        "headers",
        "--token-file",
        "/home/ada/.config/edge-kubelet/a.token",
    ]
    assert entry["url"] == "https://relay.example/mcp/kinds"


@pytest.mark.parametrize("system", ["linux", "darwin", "win32"])
def test_tokens_lie_in_a_directory_of_their_own(system: str) -> None:
    assert token_directory(machine(system)).name == "edge-kubelet"


@pytest.mark.parametrize("name", ["", "a b", "a.b", "é", "x" * 17, "../x"])
def test_a_name_that_a_client_would_reject_is_refused(name: str) -> None:
    with pytest.raises(CommandLineError, match="--name"):
        check_name(name)
    assert check_name("edge-2_b") == "edge-2_b"
