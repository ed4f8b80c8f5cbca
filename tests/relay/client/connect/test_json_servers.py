import json

import pytest

from relay.client.connect.errors import UnreadableConfigError
from relay.client.connect.json_servers import with_server, without_server

ENTRY = {"type": "http", "url": "https://relay.example/mcp"}


def test_a_server_is_added_and_all_else_stays_in_its_order() -> None:
    before = '{\n    "theme": "dark",\n    "mcpServers": {"other": {"command": "x"}},\n    "z": 1\n}\n'
    after = with_server(before, "mcpServers", "edge", ENTRY)
    assert list(json.loads(after)) == ["theme", "mcpServers", "z"]
    assert json.loads(after)["mcpServers"] == {"other": {"command": "x"}, "edge": ENTRY}
    assert after.startswith('{\n    "theme"')


def test_text_that_is_not_ascii_stays_as_it_is() -> None:
    assert '"名": "é"' in with_server('{"名": "é"}', "mcpServers", "edge", ENTRY)


@pytest.mark.parametrize("empty", ["", " \n"])
def test_an_empty_file_is_an_empty_configuration(empty: str) -> None:
    assert json.loads(with_server(empty, "servers", "edge", ENTRY)) == {"servers": {"edge": ENTRY}}


def test_what_was_added_is_taken_out_again() -> None:
    before = '{\n  "theme": "dark"\n}\n'
    assert without_server(with_server(before, "mcpServers", "edge", ENTRY), "mcpServers", "edge") == before


def test_comments_above_the_document_stay() -> None:
    before = '// Zed settings\n//\n\n  // See the manual\n{\n  "theme": "dark"\n}\n'
    after = with_server(before, "context_servers", "edge", ENTRY)
    assert after.startswith('// Zed settings\n//\n\n  // See the manual\n{\n  "theme": "dark",\n')
    assert without_server(after, "context_servers", "edge") == before


def test_the_other_servers_stay() -> None:
    before = json.dumps({"servers": {"edge": ENTRY, "other": {}}})
    assert json.loads(without_server(before, "servers", "edge")) == {"servers": {"other": {}}}


def test_nothing_changes_where_there_is_no_such_server() -> None:
    text = '{"servers":   {"other": {}}}'
    assert without_server(text, "servers", "edge") == text


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ('{\n  // the fleet\n  "servers": {}\n}', "comments"),
        ("[" * 5000, "too deeply"),
        ("[]", "no object"),
        pytest.param('{"a": 1e400}', "not finite", id="a number that would become Infinity"),
        pytest.param('{"a": NaN}', "not finite", id="NaN"),
        pytest.param('{"a": {"b": 1, "b": 2}}', "duplicate", id="a member twice"),
        pytest.param('{"a": "\\ud800"}', "surrogate", id="half a character"),
        ('{"servers": []}', "under 'servers'"),
    ],
)
def test_what_cannot_be_kept_whole_is_not_changed(text: str, why: str) -> None:
    with pytest.raises(UnreadableConfigError, match=why):
        with_server(text, "servers", "edge", ENTRY)
    with pytest.raises(UnreadableConfigError, match=why):
        without_server(text, "servers", "edge")
