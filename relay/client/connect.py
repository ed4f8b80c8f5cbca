"""Puts a relay into the configuration of an MCP client on this machine, and takes it out again.

    known = CLIENTS[ClientName.CODEX]
    file, entry = known.file(machine), known.entry(target)
    change = planned(file, lambda text: known.edit(text, known.section, "edge", entry))
    change.write()

A file is written through ``FileChange.write`` alone, which keeps it as it was beside it, and never where
something of it would be lost. Must not be given a token, and must not quote what is in a file: it may have
tokens of other servers.
"""

import json
import re
import shlex
import stat
import sys
import tomllib
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, NamedTuple

from schemas.addresses import KINDS_PATH, PLAIN_OPTION, mcp_url
from schemas.error_roots import CommandLineError, OperatorError
from schemas.files import PRIVATE, PRIVATE_DIRECTORY, read_given, write_atomic
from schemas.strict_json import JsonReason, StrictJsonError, loads

_MAX_NAME = 16
_MAX_BYTES = 16 << 20
"""Claude Code keeps a history in its configuration."""

_INDENT = re.compile(r"^([ \t]+)\"", re.MULTILINE)
_USUAL_INDENT = "  "
_COMMENTS_ABOVE = re.compile(r"(?:[ \t]*(?://[^\n]*)?\n)*")
_TABLE = re.compile(r"^\s*\[")
_COMMENT = re.compile(r"^\s*(#|$)")


class ConnectError(OperatorError):
    """The client cannot be connected; the text says why, and what to do."""


class UnreadableConfigError(ConnectError):
    """The configuration cannot be changed without loss; the text continues the file's name."""


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
        return self.named("XDG_CONFIG_HOME", self.home / ".config")

    @property
    def tokens(self) -> Path:
        base = self.home / ".config" if self.system == "darwin" else self.applications
        return base / "edge-kubelet"

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
        return mcp_url(self.url, self.path)

    @property
    def bridge(self) -> list[str]:
        command = [str(self.program), "stdio", "--url", self.mcp_url, "--token-file", str(self.token_file)]
        command += ["--root", str(self.root)] if self.root else []
        return command + ([PLAIN_OPTION] if self.plain else [])

    @property
    def headers_command(self) -> list[str]:
        return [str(self.program), "headers", "--token-file", str(self.token_file)]


Edit = Callable[[str, str, str, Mapping[str, Any] | None], str]
"""Returns a configuration's text with an entry as the server of a name in a section; without it, by None.

Raises UnreadableConfigError if it cannot be changed without loss. An empty text is an empty configuration.
"""


def edit_json(text: str, section: str, name: str, entry: Mapping[str, Any] | None) -> str:
    """Edit a configuration in JSON: an ``Edit``.

    Lines of comments above the document are kept: the files of some clients begin with them. What could not
    be kept is not rewritten: other comments, a member that is there twice, a number that is not finite, half
    a character.
    """
    above = _COMMENTS_ABOVE.match(text)
    comments = above[0] if above else ""
    body = text[len(comments) :]
    try:
        document = loads(body, max_bytes=sys.maxsize) if body.strip() else {}
    except StrictJsonError as error:
        if error.reason is JsonReason.NOT_JSON:
            raise UnreadableConfigError("is not JSON; comments cannot be kept") from None
        raise UnreadableConfigError(f"cannot be rewritten without loss: {error.reason}") from None
    if not isinstance(document, dict):
        raise UnreadableConfigError("holds no object")
    servers = document.setdefault(section, {})
    if not isinstance(servers, dict):
        raise UnreadableConfigError(f"holds no object under {section!r}")
    if entry is None and name not in servers:
        return text
    if entry is not None:
        servers[name] = dict(entry)
    else:
        del servers[name]
        if not servers:
            del document[section]
    found = _INDENT.search(text)
    indent = found[1] if found else _USUAL_INDENT
    return comments + json.dumps(document, indent=indent, ensure_ascii=False) + "\n"


def edit_toml(text: str, section: str, name: str, entry: Mapping[str, Any] | None) -> str:
    """Edit a configuration in TOML, by an entry of strings and lists of them: an ``Edit``.

    One table is put in or taken out, and all other lines stay: comments and order belong to the user. What
    results is parsed and compared with what was wanted.
    """
    expected = _read_toml(text)
    servers = expected.get(section, {})
    if not isinstance(servers, dict):
        raise UnreadableConfigError(f"holds no table {section!r}")
    if entry is None and name not in servers:
        return text
    edited, found = _without_table(text, section, name), None
    if entry is not None:
        expected[section] = {**servers, name: dict(entry)}
        # A string of JSON without what JSON escapes otherwise is one of TOML, and so is a list of them.
        lines = [f"[{section}.{name}]", *(f"{key} = {json.dumps(value)}" for key, value in entry.items())]
        gap = "\n" if edited.strip() else ""
        edited = f"{edited.rstrip()}\n{gap}".lstrip("\n") + "\n".join(lines) + "\n"
    else:
        del servers[name]
        if not servers:
            del expected[section]
    with suppress(UnreadableConfigError):  # it has what was put in twice
        # An empty table that remains of the section is the same as none.
        found = {key: value for key, value in _read_toml(edited).items() if value or key in expected}
    if found != expected:
        raise UnreadableConfigError("has its servers in a form that cannot be changed line by line")
    return edited


def _read_toml(text: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError):
        raise UnreadableConfigError("is not TOML") from None


def _without_table(text: str, section: str, name: str) -> str:
    """Return ``text`` without the lines of the server's table and of the tables below it.

    Comments behind its last value stay: they belong to what follows, a server that is switched off by them.
    """
    own = re.compile(rf"^\s*\[\s*{re.escape(section)}\s*\.\s*\"?{re.escape(name)}\"?\s*[.\]]")
    kept, inside = list[str](), False
    behind = list[str]()
    for line in text.splitlines(keepends=True):
        if _TABLE.match(line):
            inside = own.match(line) is not None
        if not inside:
            kept += [*behind, line]
        if inside and _COMMENT.match(line) and (behind or line.strip()):
            behind.append(line)
        else:
            behind = []
    return "".join(kept + behind)


def _started(target: ClientTarget) -> dict[str, Any]:
    command, *arguments = target.bridge
    return {"command": command, "args": arguments}


def _started_by_type(target: ClientTarget) -> dict[str, Any]:
    return {"type": "stdio", **_started(target)}


def _by_type_and_url(url: str) -> dict[str, Any]:
    return {"type": "http", "url": url}


def _by_url(url: str) -> dict[str, Any]:
    return {"url": url}


def _with_headers_helper(target: ClientTarget) -> dict[str, Any]:
    if target.root is not None:
        # The client trusts further roots by an environment variable of its own alone.
        return _started_by_type(target)
    helper = shlex.join(target.headers_command)
    return {"type": "http", "url": target.mcp_url, "headersHelper": helper}


def _settings_of_zed(machine: Machine) -> Path:
    if machine.system == "win32":
        return machine.applications / "Zed" / "settings.json"
    return machine.named("XDG_CONFIG_HOME", machine.home / ".config") / "zed" / "settings.json"


class McpClient(NamedTuple):
    """One client.

    Attributes:
        title: what its users call it.
        file: where its configuration is.
        then: what its user has to do after a change.
        section: the member of its configuration that holds the servers.
        entry: what it holds of a server.
        signs_in: what it holds of one that the client signs in to by itself; None if it cannot.
        makes_directory: whether its directory may be missing, because the client makes it when it first runs.
        edit: edits the text of its configuration.
    """

    title: str
    file: Callable[[Machine], Path]
    then: str
    section: str = "mcpServers"
    entry: Callable[[ClientTarget], dict[str, Any]] = _started
    signs_in: Callable[[str], dict[str, Any]] | None = _by_url
    makes_directory: bool = False
    edit: Edit = edit_json

    def reaches(self, text: str, name: str, relay: str) -> bool:
        """Return whether the server of ``name`` in the configuration ``text`` is ``relay``, without path."""
        url = f"{relay}/"
        return text.count(url) > self.edit(text, self.section, name, None).count(url)


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


CLIENTS: Mapping[ClientName, McpClient] = {
    ClientName.CLAUDE_CODE: McpClient(
        "Claude Code",
        lambda machine: machine.named("CLAUDE_CONFIG_DIR", machine.home) / ".claude.json",
        "start a new session of Claude Code",
        entry=_with_headers_helper,
        signs_in=_by_type_and_url,
        makes_directory=True,
    ),
    ClientName.CLAUDE_DESKTOP: McpClient(
        "Claude Desktop",
        lambda machine: machine.applications / "Claude" / "claude_desktop_config.json",
        "quit Claude Desktop and start it again",
        signs_in=None,
    ),
    ClientName.VSCODE: McpClient(
        "VS Code",
        lambda machine: machine.applications / "Code" / "User" / "mcp.json",
        "start the server in VS Code: MCP: List Servers",
        section="servers",
        entry=_started_by_type,
        signs_in=_by_type_and_url,
    ),
    ClientName.CODEX: McpClient(
        "Codex",
        lambda machine: machine.named("CODEX_HOME", machine.home / ".codex") / "config.toml",
        "start a new session of Codex",
        section="mcp_servers",
        makes_directory=True,
        edit=edit_toml,
    ),
    ClientName.CURSOR: McpClient(
        "Cursor",
        lambda machine: machine.home / ".cursor" / "mcp.json",
        "start Cursor again, and look for the server among its MCP servers",
    ),
    ClientName.GEMINI: McpClient(
        "Gemini CLI",
        lambda machine: machine.home / ".gemini" / "settings.json",
        "start a new session of Gemini CLI",
        signs_in=lambda url: {"httpUrl": url},
        makes_directory=True,
    ),
    ClientName.WINDSURF: McpClient(
        "Windsurf",
        lambda machine: machine.home / ".codeium" / "windsurf" / "mcp_config.json",
        "refresh the MCP servers of Windsurf's Cascade",
        signs_in=lambda url: {"serverUrl": url},
    ),
    ClientName.ZED: McpClient(
        "Zed", _settings_of_zed, "look for the server in Zed's agent panel", section="context_servers"
    ),
}


def check_name(name: str) -> str:
    """Return ``name`` if every client accepts it as a server's name.

    Raises:
        CommandLineError: it does not.
    """
    plain = name.isascii() and name.replace("-", "").replace("_", "").isalnum()
    if not plain or len(name) > _MAX_NAME:
        raise CommandLineError(f"--name takes up to {_MAX_NAME} letters, digits, - and _")
    return name


@dataclass(frozen=True, slots=True)
class FileChange:
    """What a configuration file holds, and what it is to hold. ``mode`` is None if there is no such file."""

    path: Path
    before: str
    after: str
    mode: int | None

    @property
    def is_needed(self) -> bool:
        return self.before != self.after

    @property
    def backup(self) -> Path:
        """Where the file is kept as it was before the change."""
        return self.path.with_name(f"{self.path.name}.before-edge")

    def write(self) -> None:
        """Keep the file as it was, and write it as it is to be.

        Raises:
            ConnectError: another program has changed the file meanwhile.
            OSError: it cannot be written.
        """
        if _read(self.path)[0] != self.before:
            raise ConnectError(f"{self.path} was changed meanwhile: try again")
        self.path.parent.mkdir(mode=PRIVATE_DIRECTORY, parents=True, exist_ok=True)
        if self.mode is not None:
            write_atomic(self.backup, self.before, self.mode)
        # Behind a link, as tools that manage dotfiles lay it, the file itself is replaced and not the link.
        write_atomic(self.path.resolve(), self.after, PRIVATE if self.mode is None else self.mode)


def planned(path: Path, edit: Callable[[str], str]) -> FileChange:
    """Return the change that ``edit`` makes of the file's text; a missing file has none.

    Raises:
        ConnectError: the file cannot be changed without loss; it is named.
        OSError: it cannot be read.
    """
    before, mode = _read(path)
    try:
        return FileChange(path, before, edit(before), mode)
    except UnreadableConfigError as error:
        raise ConnectError(f"{path} {error}") from None


def _read(path: Path) -> tuple[str, int | None]:
    try:
        data, mode = read_given(path, _MAX_BYTES, wait_s=0), stat.S_IMODE(path.stat().st_mode)
    except FileNotFoundError:
        return "", None
    try:
        return data.decode("utf-8"), mode
    except UnicodeDecodeError:
        raise ConnectError(f"{path} is not UTF-8") from None
