import tomllib

import pytest

from relay.client.connect.errors import UnreadableConfigError
from relay.client.connect.toml_servers import with_server, without_server

ENTRY = {"command": "/usr/bin/relay", "args": ["stdio", "--url", "https://relay.example", 'a "quoted" \\ é']}
BEFORE = """\
# what I like
model = "some-model"

[mcp_servers.other]  # keep
command = "x"

[mcp_servers.other.env]
A = "[mcp_servers.edge]"
"""


def test_a_table_is_appended_and_every_line_stays() -> None:
    after = with_server(BEFORE, "mcp_servers", "edge", ENTRY)
    assert after.startswith(BEFORE)
    assert tomllib.loads(after)["mcp_servers"]["edge"] == ENTRY


def test_a_table_is_replaced_with_the_tables_below_it() -> None:
    old = (
        '[mcp_servers.edge]\ncommand = "y"\n\n[mcp_servers.edge.env]\nB = "1"\n\n[profiles.p]\nmodel = "q"\n'
    )
    after = with_server(BEFORE + old, "mcp_servers", "edge", ENTRY)
    expected = tomllib.loads(BEFORE + old)
    expected["mcp_servers"]["edge"] = ENTRY
    assert tomllib.loads(after) == expected
    assert "# what I like" in after


def test_a_quoted_header_is_the_same_table() -> None:
    after = with_server('[ mcp_servers . "edge" ]\ncommand = "y"\n', "mcp_servers", "edge", ENTRY)
    assert tomllib.loads(after) == {"mcp_servers": {"edge": ENTRY}}


def test_what_was_added_is_taken_out_again() -> None:
    after = without_server(with_server(BEFORE, "mcp_servers", "edge", ENTRY), "mcp_servers", "edge")
    assert after.rstrip() == BEFORE.rstrip()
    assert without_server(with_server("", "mcp_servers", "edge", ENTRY), "mcp_servers", "edge") == ""


def test_nothing_changes_where_there_is_no_such_server() -> None:
    assert without_server(BEFORE, "mcp_servers", "edge") == BEFORE


@pytest.mark.parametrize(
    "text",
    [
        'mcp_servers = { edge = { command = "y" } }\n',
        'mcp_servers.edge.command = "y"\n',
        '[mcp_servers]\nedge = { command = "y" }\n',
        'a = """\n[mcp_servers.edge]\n"""\n[mcp_servers.edge]\ncommand = "y"\n',
        "not toml",
    ],
)
def test_what_cannot_be_changed_line_by_line_is_not_changed(text: str) -> None:
    with pytest.raises(UnreadableConfigError):
        without_server(text, "mcp_servers", "edge")
    with pytest.raises(UnreadableConfigError):
        with_server(text, "mcp_servers", "edge", ENTRY)
