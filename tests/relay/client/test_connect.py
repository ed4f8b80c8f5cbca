import json
import os
import shlex
import tomllib
from pathlib import Path, PurePosixPath

import pytest

from relay.client.connect import (
    CLIENTS,
    ClientName,
    ClientTarget,
    ConnectError,
    Edit,
    Machine,
    UnreadableConfigError,
    check_name,
    edit_json,
    edit_toml,
    planned,
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
    assert machine(system).tokens.name == "edge-kubelet"


@pytest.mark.parametrize("name", ["", "a b", "a.b", "é", "x" * 17, "../x"])
def test_a_name_that_a_client_would_reject_is_refused(name: str) -> None:
    with pytest.raises(CommandLineError, match="--name"):
        check_name(name)
    assert check_name("edge-2_b") == "edge-2_b"


def test_a_change_is_written_and_the_file_stays_beside_it(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text("old\n")
    file.chmod(0o640)
    change = planned(file, lambda text: text + "new\n")
    assert file.read_text() == "old\n"
    change.write()
    assert (file.read_text(), change.backup.read_text()) == ("old\nnew\n", "old\n")
    assert [path.stat().st_mode & 0o777 for path in (file, change.backup)] == [0o640, 0o640]


def test_a_file_that_is_not_there_is_made_private_and_has_no_backup(tmp_path: Path) -> None:
    change = planned(tmp_path / "new" / "config.json", lambda text: text + "new\n")
    change.write()
    assert change.path.read_text() == "new\n"
    assert change.path.stat().st_mode & 0o777 == 0o600
    assert not change.backup.exists()


def test_a_link_stays_and_its_file_is_changed(tmp_path: Path) -> None:
    (tmp_path / "real").write_text("old")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    planned(tmp_path / "link", lambda _: "new").write()
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real").read_text() == "new"


def test_a_file_that_was_changed_meanwhile_is_left_alone(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text("old")
    change = planned(file, lambda _: "new")
    file.write_text("other")
    with pytest.raises(ConnectError, match="meanwhile"):
        change.write()
    assert file.read_text() == "other"


@pytest.mark.parametrize(("content", "why"), [(b"\xff", "UTF-8"), (b" " * ((16 << 20) + 1), "too large")])
def test_a_file_that_is_no_configuration_is_not_read(tmp_path: Path, content: bytes, why: str) -> None:
    file = tmp_path / "config.json"
    file.write_bytes(content)
    with pytest.raises((ConnectError, OSError), match=why):
        planned(file, lambda text: text)


def test_a_failed_write_leaves_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "config.json"
    file.write_text("old")
    change = planned(file, lambda _: "new")

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        change.write()
    assert file.read_text() == "old"


ENTRY = {"type": "http", "url": "https://relay.example/mcp"}


def test_a_server_is_added_and_all_else_stays_in_its_order() -> None:
    before = '{\n    "theme": "dark",\n    "mcpServers": {"other": {"command": "x"}},\n    "z": 1\n}\n'
    after = edit_json(before, "mcpServers", "edge", ENTRY)
    assert list(json.loads(after)) == ["theme", "mcpServers", "z"]
    assert json.loads(after)["mcpServers"] == {"other": {"command": "x"}, "edge": ENTRY}
    assert after.startswith('{\n    "theme"')


def test_text_that_is_not_ascii_stays_as_it_is() -> None:
    assert '"名": "é"' in edit_json('{"名": "é"}', "mcpServers", "edge", ENTRY)


@pytest.mark.parametrize("empty", ["", " \n"])
def test_an_empty_file_is_an_empty_configuration(empty: str) -> None:
    assert json.loads(edit_json(empty, "servers", "edge", ENTRY)) == {"servers": {"edge": ENTRY}}


def test_comments_above_the_document_stay() -> None:
    before = '// Zed settings\n//\n\n  // See the manual\n{\n  "theme": "dark"\n}\n'
    after = edit_json(before, "context_servers", "edge", ENTRY)
    assert after.startswith('// Zed settings\n//\n\n  // See the manual\n{\n  "theme": "dark",\n')
    assert edit_json(after, "context_servers", "edge", None) == before


def test_the_other_servers_stay() -> None:
    before = json.dumps({"servers": {"edge": ENTRY, "other": {}}})
    assert json.loads(edit_json(before, "servers", "edge", None)) == {"servers": {"other": {}}}


TABLE = {"command": "/usr/bin/relay", "args": ["stdio", "--url", "https://relay.example", 'a "quoted" \\ é']}
BEFORE = """\
# what I like
model = "some-model"

[mcp_servers.other]  # keep
command = "x"

[mcp_servers.other.env]
A = "[mcp_servers.edge]"
"""


TOP = 'model = "some-model"\n\n'


def test_in_toml_a_table_is_appended_and_every_line_stays() -> None:
    after = edit_toml(BEFORE, "mcp_servers", "edge", TABLE)
    assert after.startswith(BEFORE)
    assert tomllib.loads(after)["mcp_servers"]["edge"] == TABLE


def test_in_toml_a_table_is_replaced_with_the_tables_below_it() -> None:
    old = (
        '[mcp_servers.edge]\ncommand = "y"\n\n[mcp_servers.edge.env]\nB = "1"\n\n[profiles.p]\nmodel = "q"\n'
    )
    after = edit_toml(BEFORE + old, "mcp_servers", "edge", TABLE)
    expected = tomllib.loads(BEFORE + old)
    expected["mcp_servers"]["edge"] = TABLE
    assert tomllib.loads(after) == expected
    assert "# what I like" in after


def test_in_toml_the_comments_behind_a_table_stay() -> None:
    behind = '# [mcp_servers.db]  switched off\n# command = "d"\n\n# mine\n'
    old = f'[mcp_servers.edge]\n# of this table\ncommand = "y"\n\n{behind}'
    for after in ("[mcp_servers.other]\na = 1\n", ""):
        assert edit_toml(f"{TOP}{old}{after}", "mcp_servers", "edge", None) == f"{TOP}{behind}{after}"


def test_in_toml_a_quoted_header_is_the_same_table() -> None:
    after = edit_toml('[ mcp_servers . "edge" ]\ncommand = "y"\n', "mcp_servers", "edge", TABLE)
    assert tomllib.loads(after) == {"mcp_servers": {"edge": TABLE}}


@pytest.mark.parametrize(
    ("edit", "before"),
    [(edit_json, '{\n  "theme": "dark"\n}\n'), (edit_toml, BEFORE), (edit_toml, "")],
    ids=repr,
)
def test_what_was_added_is_taken_out_again(edit: Edit, before: str) -> None:
    after = edit(edit(before, "servers", "edge", TABLE), "servers", "edge", None)
    assert after.rstrip() == before.rstrip()


@pytest.mark.parametrize(("edit", "text"), [(edit_json, '{"servers":   {"other": {}}}'), (edit_toml, BEFORE)])
def test_nothing_changes_where_there_is_no_such_server(edit: Edit, text: str) -> None:
    assert edit(text, "servers", "edge", None) == text


@pytest.mark.parametrize(
    ("edit", "text", "why"),
    [
        (edit_json, '{\n  // the fleet\n  "servers": {}\n}', "comments"),
        (edit_json, "[" * 5000, "too deeply"),
        (edit_json, "[]", "no object"),
        pytest.param(edit_json, '{"a": 1e400}', "not finite", id="a number that would become Infinity"),
        pytest.param(edit_json, '{"a": NaN}', "not finite", id="NaN"),
        pytest.param(edit_json, '{"a": {"b": 1, "b": 2}}', "duplicate", id="a member twice"),
        pytest.param(edit_json, '{"a": "\\ud800"}', "surrogate", id="half a character"),
        (edit_json, '{"servers": []}', "under 'servers'"),
        (edit_toml, 'servers = { edge = { command = "y" } }\n', "line by line"),
        (edit_toml, '[servers.edge]\ncommand = """\n[x]\n"""\n', "line by line"),
        (edit_toml, 'servers.edge.command = "y"\n', "line by line"),
        (edit_toml, '[servers]\nedge = { command = "y" }\n', "line by line"),
        (edit_toml, 'a = """\n[servers.edge]\n"""\n[servers.edge]\ncommand = "y"\n', "line by line"),
        (edit_toml, "servers = 3\n", "no table 'servers'"),
        (edit_toml, "not toml", "not TOML"),
    ],
)
def test_what_cannot_be_kept_whole_is_not_changed(edit: Edit, text: str, why: str) -> None:
    with pytest.raises(UnreadableConfigError, match=why):
        edit(text, "servers", "edge", TABLE)
    with pytest.raises(UnreadableConfigError, match=why):
        edit(text, "servers", "edge", None)


def test_a_client_that_signs_in_is_given_the_url_and_nothing_else() -> None:
    url = "https://relay.example/mcp/kinds"
    entries = {name: client.signs_in(url) for name, client in CLIENTS.items() if client.signs_in is not None}
    assert CLIENTS.keys() - entries.keys() == {ClientName.CLAUDE_DESKTOP}
    for entry in entries.values():
        assert url in entry.values()
        assert not {"command", "args", "headers", "headersHelper", "env"} & entry.keys()
