"""``relay connect``: puts a relay into the configuration of an MCP client, and proves that it works there.

Must not write a token into a configuration, a backup or a command line. Only ``relay headers`` prints one: to
the client that runs it.
"""

import json
import os
import shlex
import shutil
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from relay.cli import remote_server as remote
from relay.cli.exits import fail
from relay.cli.options import AsJson
from relay.client.connect import (
    CLIENTS,
    ClientName,
    ClientTarget,
    ConnectError,
    FileChange,
    Machine,
    McpClient,
    check_name,
    planned,
)
from relay.client.credentials import RenewableToken, check_token_file
from relay.settings.config import View
from schemas.addresses import KINDS_PATH, MCP_PATH, TOOLS_PATH, check_private_url, parse_mcp_url
from schemas.files import read_named_secret
from schemas.process.cli_manual import example, group
from schemas.process.command_errors import EXIT_USAGE
from schemas.process.state_owner import needed_home_directory
from schemas.text import printable

_PROGRAM = "relay"
_MAX_LINE = 4096
_PATHS = {View.TOOLS: TOOLS_PATH, View.KINDS: KINDS_PATH}


app = group("Put the relay into the configuration of an MCP client.")
headers_app = group("What Claude Code runs.")


@app.command(epilog=example("relay connect claude-code --url https://relay.example"))
def connect(
    client: Annotated[ClientName, typer.Argument(metavar="CLIENT", help="The client.", show_default=False)],
    url: Annotated[str | None, typer.Option(metavar="URL", help="The relay. Not needed by --remove.")] = None,
    view: Annotated[
        View | None, typer.Option(help="List each node's tools, or one tool of a kind. Default: kinds.")
    ] = None,
    name: Annotated[str, typer.Option(help="What the client calls the server.")] = "edge",
    token_file: Annotated[Path | None, remote.kept_token("for this client")] = None,
    root: remote.Root = None,
    client_config: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="The client's configuration. Default: where it usually is."),
    ] = None,
    plain: remote.Plain = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the change, and write nothing.")] = False,
    remove: Annotated[bool, typer.Option("--remove", help="Take the server out again.")] = False,
    as_json: AsJson = False,
) -> None:
    """Put the relay into the configuration of an MCP client on this machine.

    Shows the change, lists the tools as the client will, and writes the file; the file as it was stays
    beside it. The configuration names the file of the token and never holds the token.
    """
    machine = Machine(sys.platform, needed_home_directory(), os.environ)
    plan = _Plan.of(client, check_name(name), machine, client_config)
    if remove:
        plan.remove(dry_run=dry_run, as_json=as_json)
        return
    if url is None:
        fail("--url is missing: the relay, for example https://relay.example", EXIT_USAGE)
    relay, path = parse_mcp_url(url)
    if view is not None and path not in {MCP_PATH, _PATHS[view]}:
        fail(f"--view {view} and {path} in --url are not the same view: leave out one of them", EXIT_USAGE)
    check_private_url(relay, plain_allowed=plain)
    kept = token_file is None
    lies_in = plan.token_file if token_file is None else check_token_file(token_file)
    if kept and not dry_run:
        remote.keep_given_token(lies_in)
    connection = ClientTarget(
        url=relay,
        program=_own_program(),
        token_file=lies_in,
        path=_PATHS[view or View.KINDS] if path == MCP_PATH else path,
        root=root.absolute() if root is not None else None,
        plain=plain,
    )
    plan.connect(connection, dry_run=dry_run, as_json=as_json)


@headers_app.command(hidden=True, epilog=example("relay headers --token-file token"))
def headers(
    token_file: Annotated[
        Path, typer.Option(metavar="FILE", help="The file of the bearer token, mode 0600.")
    ],
) -> None:
    """Print the HTTP headers of a request as JSON: what Claude Code's `headersHelper` runs."""
    check_token_file(token_file)
    typer.echo(json.dumps({"Authorization": f"Bearer {read_named_secret(token_file).strip()}"}))


@dataclass(frozen=True, slots=True)
class _Plan:
    """One client on this machine, and the server's name in it."""

    client: McpClient
    name: str
    file: Path
    token_file: Path

    @classmethod
    def of(cls, client: ClientName, name: str, machine: Machine, file: Path | None) -> "_Plan":
        known = CLIENTS[client]
        return cls(
            client=known,
            name=name,
            file=file or known.file(machine),
            token_file=machine.tokens / f"{client}-{name}.token",
        )

    def connect(self, connection: ClientTarget, *, dry_run: bool, as_json: bool) -> None:
        """Show the change, prove the connection, and write it."""
        if not self.file.parent.is_dir() and not self.client.makes_directory:
            raise ConnectError(
                f"{self.client.title} has no configuration in {self.file.parent}: install and start it once"
            )
        entry, section = self.client.entry(connection), self.client.section
        added = partial(self.client.form.with_server, section=section, name=self.name, entry=entry)
        change = planned(self.file, added)
        self._show(change, added(""), as_json=as_json)
        if dry_run:
            self._report(change, as_json=as_json, written=False)
            return
        tools = _tools(connection, over_stdio="command" in entry)
        if change.is_needed:
            change.write()
        self._report(change, as_json=as_json, written=change.is_needed, tools=tools)

    def remove(self, *, dry_run: bool, as_json: bool) -> None:
        """Show the change and write it; the token that was kept for it goes as well."""
        edit = partial(self.client.form.without_server, section=self.client.section, name=self.name)
        change = planned(self.file, edit)
        self._show(change, "", as_json=as_json)
        if not dry_run:
            if change.is_needed:
                change.write()
            self.token_file.unlink(missing_ok=True)
        self._report(change, as_json=as_json, written=change.is_needed and not dry_run)

    def _show(self, change: FileChange, added: str, *, as_json: bool) -> None:
        """Show what the file is to hold of this server, and nothing else in it: that may have secrets."""
        if not change.is_needed:
            return
        what = "becomes" if added else "is taken out"
        lines = [f"{change.path}: {self.client.section}.{self.name} {what}", *added.splitlines()]
        for line in lines:
            # With --json, standard output holds one document.
            typer.echo(printable(line, _MAX_LINE), err=as_json)

    def _report(self, change: FileChange, *, as_json: bool, written: bool, tools: int | None = None) -> None:
        has_backup = written and change.mode is not None
        if as_json:
            facts = {"client": self.client.title, "file": str(self.file), "written": written, "tools": tools}
            backup = str(change.backup) if has_backup else None
            typer.echo(json.dumps({**facts, "name": self.name, "backup": backup}))
            return
        if tools is not None:
            typer.echo(f"{tools} tools are listed.")
        if not written:
            typer.echo("Nothing was written." if change.is_needed else f"{self.file} needs no change.")
            return
        typer.echo(f"{self.file} is written." + (f" As it was: {change.backup}" if has_backup else ""))
        typer.echo(f"Now {self.client.then}.")


def _own_program() -> Path:
    """Return the absolute path of this program, by which a client can start it from anywhere."""
    beside = shutil.which(_PROGRAM, path=os.fspath(Path(sys.executable).parent))
    found = shutil.which(sys.argv[0]) if Path(sys.argv[0]).stem == _PROGRAM else None
    program = found or beside
    if program is None:
        raise ConnectError(f"the program {_PROGRAM} is not installed beside {sys.executable}")
    return Path(program).absolute()


def _tools(connection: ClientTarget, *, over_stdio: bool) -> int:
    """Return how many tools there are, asked for as the client will ask.

    Raises:
        ConnectError: the relay is not reached.
    """
    options = (
        remote.RemoteOptions(url=None, stdio=shlex.join(connection.bridge))
        if over_stdio
        else remote.RemoteOptions(
            connection.mcp_url,
            token_file=connection.token_file,
            root=connection.root,
            plain=connection.plain,
        )
    )
    return len(remote.run_command(_survey(connection, options), as_json=False))


async def _reach(connection: ClientTarget) -> None:
    """Return when the relay has answered, whatever it was.

    The bridge would try again for as long as a client waits: the relay may be about to start.

    Raises:
        ConnectError: it is not reached.
    """
    from relay.client.http import tls_by  # noqa: PLC0415 - for a command that runs
    from relay.client.stdio_bridge.http_client import (  # noqa: PLC0415 - as above
        LostError,
        NotSentError,
        RelayHttp,
    )

    token = RenewableToken.find(connection.token_file, {})
    http = RelayHttp(connection.mcp_url, token, tls_by(connection.root), connection.root)
    try:
        async with http.exchange("GET", {}):
            return
    except NotSentError as error:
        raise ConnectError(f"{connection.url} is not reached: {error}") from None
    except LostError as error:
        raise ConnectError(f"{connection.url} does not answer: {error}") from None
    finally:
        await http.close()


async def _survey(connection: ClientTarget, options: remote.RemoteOptions) -> list[Any]:
    await _reach(connection)
    return await remote.survey(options)
