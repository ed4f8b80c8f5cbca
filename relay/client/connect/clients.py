"""The MCP clients that are known: where each has its configuration, and what it holds of a server.

Must not read or write a file, and must not be given a token: no configuration holds one.
"""

import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Protocol

from relay.client.connect import json_servers, toml_servers
from schemas.addresses import KINDS_PATH, mcp_url
from schemas.error_roots import CommandLineError

_MAX_NAME = 16


class ClientName(StrEnum):
    """A client, as the command line names it."""

    CLAUDE_CODE = "claude-code"
    CLAUDE_DESKTOP = "claude-desktop"
    VSCODE = "vscode"
    CODEX = "codex"
    CURSOR = "cursor"
    GEMINI = "gemini"
    WINDSURF = "windsurf"
    ZED = "zed"


@dataclass(frozen=True, slots=True)
class Machine:
    """What of this machine decides where configurations lie. ``system`` is ``sys.platform``."""

    system: str
    home: Path
    environment: Mapping[str, str]

    @property
    def applications(self) -> Path:
        """The directory in which desktop applications have their configuration."""
        if self.system == "win32":
            return Path(self.environment.get("APPDATA") or self.home / "AppData" / "Roaming")
        if self.system == "darwin":
            return self.home / "Library" / "Application Support"
        return Path(self.environment.get("XDG_CONFIG_HOME") or self.home / ".config")

    def named(self, variable: str, usual: Path) -> Path:
        """Return the directory that ``variable`` names, else ``usual``."""
        return Path(self.environment.get(variable) or usual)


@dataclass(frozen=True, slots=True)
class ClientTarget:
    """What the client is to reach, and by which program of ours.

    Attributes:
        url: the relay, without path; ``path`` is one of MCP, whose names every client accepts.
        program: the absolute path of ``relay``.
        root: the root of the relay's certificate, if this machine does not trust it.
    """

    url: str
    program: Path
    token_file: Path
    path: str = KINDS_PATH
    root: Path | None = None
    plain: bool = False

    @property
    def mcp_url(self) -> str:
        """The URL of MCP."""
        return mcp_url(self.url, self.path)

    @property
    def bridge(self) -> list[str]:
        """The command line of the bridge."""
        command = [str(self.program), "stdio", "--url", self.mcp_url, "--token-file", str(self.token_file)]
        command += ["--root", str(self.root)] if self.root else []
        return command + (["--insecure-plain-transports"] if self.plain else [])

    @property
    def headers_command(self) -> list[str]:
        """The command line that prints the headers of a request."""
        return [str(self.program), "headers", "--token-file", str(self.token_file)]


class ServersOfFormat(Protocol):
    """The servers in a text of one format."""

    def with_server(self, text: str, section: str, name: str, entry: Mapping[str, Any]) -> str:
        """Return ``text`` with a server."""

    def without_server(self, text: str, section: str, name: str) -> str:
        """Return ``text`` without it."""


@dataclass(frozen=True, slots=True)
class McpClient:
    """One client.

    Attributes:
        title: what its users call it.
        section: the member of its configuration that holds the servers.
        servers: what edits a text of the file's format.
        file: where the configuration is.
        entry: what it holds of a server.
        makes_directory: whether its directory may be missing, because the client makes it when it first runs.
        then: what its user has to do after a change.
    """

    title: str
    section: str
    servers: ServersOfFormat
    file: Callable[[Machine], Path]
    entry: Callable[[ClientTarget], dict[str, Any]]
    makes_directory: bool
    then: str


def _started(connection: ClientTarget) -> dict[str, Any]:
    command, *arguments = connection.bridge
    return {"command": command, "args": arguments}


def _started_by_type(connection: ClientTarget) -> dict[str, Any]:
    return {"type": "stdio", **_started(connection)}


def _with_headers_helper(connection: ClientTarget) -> dict[str, Any]:
    if connection.root is not None:
        # The client trusts further roots by an environment variable of its own alone.
        return _started_by_type(connection)
    helper = shlex.join(connection.headers_command)
    return {"type": "http", "url": connection.mcp_url, "headersHelper": helper}


def _settings_of_zed(machine: Machine) -> Path:
    if machine.system == "win32":
        return machine.applications / "Zed" / "settings.json"
    return machine.named("XDG_CONFIG_HOME", machine.home / ".config") / "zed" / "settings.json"


CLIENTS: Mapping[ClientName, McpClient] = {
    ClientName.CLAUDE_CODE: McpClient(
        title="Claude Code",
        section="mcpServers",
        servers=json_servers,
        file=lambda machine: machine.named("CLAUDE_CONFIG_DIR", machine.home) / ".claude.json",
        entry=_with_headers_helper,
        makes_directory=True,
        then="start a new session of Claude Code",
    ),
    ClientName.CLAUDE_DESKTOP: McpClient(
        title="Claude Desktop",
        section="mcpServers",
        servers=json_servers,
        file=lambda machine: machine.applications / "Claude" / "claude_desktop_config.json",
        entry=_started,
        makes_directory=False,
        then="quit Claude Desktop and start it again",
    ),
    ClientName.VSCODE: McpClient(
        title="VS Code",
        section="servers",
        servers=json_servers,
        file=lambda machine: machine.applications / "Code" / "User" / "mcp.json",
        entry=_started_by_type,
        makes_directory=False,
        then="start the server in VS Code: MCP: List Servers",
    ),
    ClientName.CODEX: McpClient(
        title="Codex",
        section="mcp_servers",
        servers=toml_servers,
        file=lambda machine: machine.named("CODEX_HOME", machine.home / ".codex") / "config.toml",
        entry=_started,
        makes_directory=True,
        then="start a new session of Codex",
    ),
    ClientName.CURSOR: McpClient(
        title="Cursor",
        section="mcpServers",
        servers=json_servers,
        file=lambda machine: machine.home / ".cursor" / "mcp.json",
        entry=_started,
        makes_directory=False,
        then="start Cursor again, and look for the server among its MCP servers",
    ),
    ClientName.GEMINI: McpClient(
        title="Gemini CLI",
        section="mcpServers",
        servers=json_servers,
        file=lambda machine: machine.home / ".gemini" / "settings.json",
        entry=_started,
        makes_directory=True,
        then="start a new session of Gemini CLI",
    ),
    ClientName.WINDSURF: McpClient(
        title="Windsurf",
        section="mcpServers",
        servers=json_servers,
        file=lambda machine: machine.home / ".codeium" / "windsurf" / "mcp_config.json",
        entry=_started,
        makes_directory=False,
        then="refresh the MCP servers of Windsurf's Cascade",
    ),
    ClientName.ZED: McpClient(
        title="Zed",
        section="context_servers",
        servers=json_servers,
        file=_settings_of_zed,
        entry=_started,
        makes_directory=False,
        then="look for the server in Zed's agent panel",
    ),
}
"""What is written for each client; none of them needs the token itself in a file of its own."""


def token_directory(machine: Machine) -> Path:
    """Return the directory for the files of tokens."""
    if machine.system == "darwin":
        return machine.home / ".config" / "edge-kubelet"
    return machine.applications / "edge-kubelet"


def check_name(name: str) -> str:
    """Return ``name`` if every client accepts it as a server's name.

    Raises:
        CommandLineError: it does not.
    """
    plain = name.isascii() and name.replace("-", "").replace("_", "").isalnum()
    if not plain or len(name) > _MAX_NAME:
        raise CommandLineError(f"--name takes up to {_MAX_NAME} letters, digits, - and _")
    return name
