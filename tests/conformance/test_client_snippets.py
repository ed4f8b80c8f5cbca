"""The snippets of docs/clients.md: each parses, and all say the same URL, server name and token."""

import json
import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from relay.client.credentials import TOKEN_VARIABLE

TEXT = (Path(__file__).parent.parent.parent / "docs" / "clients.md").read_text("utf-8")
SECTIONS = {part.partition("\n")[0]: part for part in re.split(r"(?m)^## ", TEXT)[1:]}
SNIPPETS = [
    pytest.param(language, body, id=f"{client}-{language}")
    for client, section in SECTIONS.items()
    for language, body in re.findall(r"(?ms)^```(\w*)\n(.*?)^```$", section)
]
EVERY_SNIPPET = pytest.mark.parametrize(("language", "body"), SNIPPETS)
CLIENTS = ["Claude Code", "Claude Desktop", "VS Code", "Codex", "Cursor"]

TOKENS = {"<token>", "EDGE_TOKEN", "$EDGE_TOKEN", "${EDGE_TOKEN}", "${env:EDGE_TOKEN}", "${input:edge-token}"}

# The members that the clients know; a misspelt one they ignore without an error.
SERVER_MEMBERS = {
    "type",
    "url",
    "headers",
    "command",
    "args",
    "env",
    "bearer_token_env_var",
}
FLAGS = {
    "claude": {"--transport", "--header"},
    "codex": {"--url", "--bearer-token-env-var"},
}


def server_of(language: str, body: str) -> dict[str, Any]:
    """Return the one server that a configuration names, which is ``edge``."""
    document: dict[str, Any] = json.loads(body) if language == "json" else tomllib.loads(body)
    [servers] = [document[key] for key in ("mcpServers", "servers", "mcp_servers") if key in document]
    assert list(servers) == ["edge"]
    server: dict[str, Any] = servers["edge"]
    return server


def strings_in(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from strings_in(inner)


def strings_of(language: str, body: str) -> list[str]:
    return shlex.split(body) if language == "sh" else list(strings_in(server_of(language, body)))


@pytest.mark.parametrize("client", CLIENTS)
def test_every_client_has_a_section_with_a_snippet(client: str) -> None:
    assert "```" in SECTIONS[client]


@EVERY_SNIPPET
def test_a_snippet_has_the_one_url_of_the_kinds_view_by_path(language: str, body: str) -> None:
    strings = strings_of(language, body)
    assert [text for text in strings if "://" in text] == ["https://relay.example/mcp/kinds"]
    if "stdio" in strings:
        assert strings[:4] == ["relay", "stdio", "--url", "https://relay.example/mcp/kinds"]


@EVERY_SNIPPET
def test_a_snippet_brings_a_bearer_token_and_writes_none_down(language: str, body: str) -> None:
    strings = strings_of(language, body)
    headers = [text.partition("Bearer ")[2] for text in strings if "Bearer " in text]
    variables = [text for text in strings if text in {"EDGE_TOKEN", "<token>"}]
    [token] = headers + variables
    assert token in TOKENS


@EVERY_SNIPPET
def test_a_snippet_uses_the_members_and_flags_that_its_client_knows(language: str, body: str) -> None:
    if language == "sh":
        program, *words = shlex.split(body)
        assert words[:2] == ["mcp", "add"]
        assert "edge" in words
        assert {word for word in words if word.startswith("--")} == FLAGS[program]
        return
    server = server_of(language, body)
    assert set(server) <= SERVER_MEMBERS
    assert ("url" in server) != ("command" in server)


def test_a_variable_that_a_snippet_asks_for_is_one_that_it_declares() -> None:
    code = json.loads(re.findall(r"(?ms)^```json\n(.*?)^```$", SECTIONS["VS Code"])[0])
    asked = set(re.findall(r"\$\{input:([\w-]+)\}", json.dumps(code["servers"])))
    assert asked == {item["id"] for item in code["inputs"]}
    own, other = map(json.loads, re.findall(r"(?ms)^```json\n(.*?)^```$", SECTIONS["Claude Desktop"]))
    assert list(own["mcpServers"]["edge"]["env"]) == [TOKEN_VARIABLE]
    bridge = other["mcpServers"]["edge"]
    assert set(re.findall(r"\$\{(\w+)\}", " ".join(bridge["args"]))) == set(bridge["env"])
    # A space in an argument is torn apart by the one platform, and a version that is not pinned by its maker.
    assert not any(" " in argument for argument in bridge["args"])
    assert re.fullmatch(r"mcp-remote@\d+\.\d+\.\d+", bridge["args"][1])
