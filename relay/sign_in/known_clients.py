"""The clients that are known to publish a document of themselves: for when it cannot be fetched.

A document that was fetched counts, and never this table. Each row says where it was read, and when. Must not
be used to believe a client that has no such document.
"""

import re
from typing import NamedTuple

from schemas.labels import look_of


class KnownClient(NamedTuple):
    """A client: ``client_id`` is its document's URL, in which ``{id}`` stands for one part of a path."""

    name: str
    client_id: str
    redirect_uris: tuple[str, ...]
    source: str
    read_on: str

    def redirects_of(self, client_id: str) -> tuple[str, ...] | None:
        """Return where codes for ``client_id`` may be sent, if it is of this client."""
        pattern = re.escape(self.client_id).replace(r"\{id\}", "([A-Za-z0-9_-]{1,128})")
        found = re.fullmatch(pattern, client_id)
        if found is None:
            return None
        part = found[1] if found.groups() else ""
        return tuple(uri.replace("{id}", part) for uri in self.redirect_uris)


_LOOPBACK = ("http://127.0.0.1/callback", "http://localhost/callback")
_NOTES = "the client's published documents, and reports of its users"
_DATE = "2026-11-23"

KNOWN_CLIENTS = (
    KnownClient(
        "Claude",
        "https://claude.ai/oauth/mcp-oauth-client-metadata",
        ("https://claude.ai/api/mcp/auth_callback", "https://claude.com/api/mcp/auth_callback"),
        "claude.com/docs/connectors/building/authentication",
        _DATE,
    ),
    KnownClient(
        "Claude Code",
        "https://claude.ai/oauth/claude-code-client-metadata",
        _LOOPBACK,
        "anthropics/claude-code issues 37747 and 69917",
        _DATE,
    ),
    KnownClient(
        "ChatGPT",
        "https://chatgpt.com/oauth/{id}/client.json",
        ("https://chatgpt.com/connector/oauth/{id}",),
        "developers.openai.com/plugins/build/auth",
        _DATE,
    ),
    KnownClient(
        "Codex",
        "https://chatgpt.com/oauth/codex/client.json",
        _LOOPBACK,
        "openai/codex issues 28830 and 37387",
        _DATE,
    ),
    KnownClient(
        "Visual Studio Code",
        "https://vscode.dev/oauth/client-metadata.json",
        (
            "https://vscode.dev/redirect",
            "https://insiders.vscode.dev/redirect",
            "http://127.0.0.1/",
            "http://127.0.0.1:33418/",
        ),
        "microsoft/vscode issues 262278 and 278512",
        _DATE,
    ),
    KnownClient(
        "GitHub Copilot CLI",
        "https://github.com/copilot/cli/client-metadata.json",
        ("http://127.0.0.1/oauth_callback", "http://localhost/oauth_callback", *_LOOPBACK),
        "github/copilot-cli issue 1951",
        _DATE,
    ),
    KnownClient("Zed", "https://zed.dev/oauth/client-metadata.json", _LOOPBACK, _NOTES, _DATE),
    KnownClient(
        "Goose",
        "https://goose-docs.ai/oauth/client-metadata.json",
        ("http://[::1]/oauth_callback", "http://127.0.0.1/oauth_callback", "http://localhost/oauth_callback"),
        _NOTES,
        _DATE,
    ),
    KnownClient(
        "opencode",
        "https://opencode.ai/oauth/opencode/client.json",
        ("http://127.0.0.1/mcp/oauth/callback", *_LOOPBACK),
        _NOTES,
        _DATE,
    ),
)
_NAMES = ("Cursor", *(client.name for client in KNOWN_CLIENTS))


def known_client(client_id: str) -> tuple[KnownClient, tuple[str, ...]] | None:
    """Return the client of that document, and where its codes may be sent."""
    # The rows of one name each before patterns.
    for client in sorted(KNOWN_CLIENTS, key=lambda each: "{id}" in each.client_id):
        if (redirects := client.redirects_of(client_id)) is not None:
            return client, redirects
    return None


def imitated_by(name: str) -> str | None:
    """Return the known client whose name ``name`` has in it; it proves nothing of who uses it."""
    letters = _letters(name)
    return next((known for known in _NAMES if _letters(known) in letters), None)


def _letters(name: str) -> str:
    return re.sub(r"[^a-z]", "", look_of(name))
