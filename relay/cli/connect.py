"""What MCP clients are given: ``relay connect`` edits their configuration, and they start ``relay stdio``.

Must not write a token into a configuration, a backup or a command line. Only ``relay headers`` prints one: to
the client that runs it. ``relay stdio`` prints nothing on standard output, which carries the protocol.
"""

import json
import os
import shlex
import shutil
import sys
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlencode

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
from relay.client.credentials import RenewableToken, TokenMissingError, check_token_file
from schemas.addresses import (
    KINDS_PATH,
    MCP_PATH,
    TOOLS_PATH,
    View,
    check_private_url,
    mcp_url,
    parse_mcp_url,
)
from schemas.canonical import blake3_hex
from schemas.files import read_named_secret
from schemas.process.cli_manual import example, group
from schemas.process.command_errors import EXIT_CANNOT_RUN, EXIT_USAGE
from schemas.process.state_owner import act_as_owner_of, needed_home_directory
from schemas.strict_json import StrictJsonError, loads
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
    sign_in: Annotated[
        bool, typer.Option("--sign-in", help="The client signs in by itself, in a browser: no token is kept.")
    ] = False,
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
    known, usual = CLIENTS[client], CLIENTS[client].file(machine)
    file = usual if client_config is None else client_config.absolute()
    # Each configuration has a token of its own, which goes with it.
    which = "" if file == usual else f"-{blake3_hex(bytes(file))[:12]}"
    plan = _Plan(known, name, file, machine.tokens / f"{client}-{check_name(name)}{which}.token")
    act_as_owner_of(plan.file.parent)
    if remove:
        plan.remove(dry_run=dry_run, as_json=as_json)
        return
    if url is None:
        fail("--url is missing: the relay, for example https://relay.example", EXIT_USAGE)
    relay, path = parse_mcp_url(url)
    if view is not None and path not in {MCP_PATH, _PATHS[view]}:
        fail(f"--view {view} and {path} in --url are not the same view: leave out one of them", EXIT_USAGE)
    check_private_url(relay, plain_allowed=plain)
    if sign_in:
        if token_file is not None or root is not None:
            what = "--root: the client would not trust the relay" if token_file is None else "--token-file"
            fail(f"--sign-in needs no {what}, leave it out", EXIT_USAGE)
        path = _PATHS[view or View.KINDS] if path == MCP_PATH else path
        plan.sign_in(relay, mcp_url(relay, path), dry_run=dry_run, as_json=as_json)
        return
    connection = ClientTarget(
        url=relay,
        program=_own_program(),
        token_file=plan.token_file if token_file is None else check_token_file(token_file),
        path=_PATHS[view or View.KINDS] if path == MCP_PATH else path,
        root=root.absolute() if root is not None else None,
        plain=plain,
    )
    plan.connect(connection, is_token_given=token_file is not None, dry_run=dry_run, as_json=as_json)


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

    def _check_installed(self) -> None:
        if not self.file.parent.is_dir() and not self.client.makes_directory:
            raise ConnectError(
                f"{self.client.title} has no configuration in {self.file.parent}: install and start it once"
            )

    def sign_in(self, relay: str, url: str, *, dry_run: bool, as_json: bool) -> None:
        """Show the change, find that the relay has a sign-in, and write it."""
        if self.client.signs_in is None:
            raise ConnectError(f"{self.client.title} takes {url} in its settings, under Connectors")
        self._check_installed()
        added = self._edit(self.client.signs_in(url))
        change = planned(self.file, added)
        self._show(change, added(""), as_json=as_json)
        if not dry_run:
            remote.run_command(_has_sign_in(relay), as_json=False)
            if change.is_needed:
                change.write()
        self._report(change, as_json=as_json, written=change.is_needed and not dry_run)

    def connect(
        self, connection: ClientTarget, *, is_token_given: bool, dry_run: bool, as_json: bool
    ) -> None:
        """Show the change, prove the connection, and write it; a token that is not given is kept with it."""
        self._check_installed()
        entry = self.client.entry(connection)
        added = self._edit(entry)
        change = planned(self.file, added)
        if dry_run:
            self._show(change, added(""), as_json=as_json)
            self._report(change, as_json=as_json, written=False)
            return
        # The token that is kept may be that of another server, of which this one must not learn it.
        is_for_it = self.client.reaches(change.before, self.name, connection.url)
        with (
            nullcontext(connection.token_file)
            if is_token_given
            else remote.new_token(self.token_file, is_for_it=is_for_it)
        ) as tried:
            self._show(change, added(""), as_json=as_json)
            tools = _tools(replace(connection, token_file=tried), over_stdio="command" in entry)
            if change.is_needed:
                change.write()
        self._report(change, as_json=as_json, written=change.is_needed, tools=tools)

    def remove(self, *, dry_run: bool, as_json: bool) -> None:
        """Show the change and write it; the token that was kept for it goes as well."""
        change = planned(self.file, self._edit(None))
        self._show(change, "", as_json=as_json)
        if not dry_run:
            if change.is_needed:
                change.write()
            self.token_file.unlink(missing_ok=True)
        self._report(change, as_json=as_json, written=change.is_needed and not dry_run)

    def _edit(self, entry: Mapping[str, Any] | None) -> Callable[[str], str]:
        return lambda text: self.client.edit(text, self.client.section, self.name, entry)

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


async def _has_sign_in(relay: str) -> None:
    """Return if the relay says that people sign in there.

    Raises:
        ConnectError: it does not, or is not reached.
    """
    import httpx2  # noqa: PLC0415 - for a command that runs

    from relay.client.http import (  # noqa: PLC0415 - as above
        ANSWERED_WITHIN_S,
        CONNECT_TIMEOUT_S,
        MOST_ANSWER_BYTES,
        short_answer,
        tls_by,
        transport_to,
        why_unreachable,
    )

    url = f"{relay}/.well-known/oauth-authorization-server"
    transport = transport_to(relay, tls_by(None))
    client = httpx2.AsyncClient(transport=transport, timeout=CONNECT_TIMEOUT_S, trust_env=False)
    try:
        answer = await short_answer(client, "GET", url)
    except httpx2.HTTPError as error:
        reason, advice = why_unreachable(error, relay, None, takes_root=False)
        raise ConnectError(f"{relay} is not reached: {reason}{(advice and f'; {advice}') or ''}") from None
    except TimeoutError:
        raise ConnectError(f"{relay} does not answer in {ANSWERED_WITHIN_S:.0f} s") from None
    try:
        document = loads(answer.content, max_bytes=MOST_ANSWER_BYTES)
        issuer = document["issuer"] if answer.is_success else None
    except (StrictJsonError, TypeError, KeyError):
        issuer = None
    if issuer is None:
        raise ConnectError(f"{relay} has no sign-in: its operator invites people by `relay people invite`")
    if issuer != relay:
        raise ConnectError(
            f"{relay} calls itself {printable(str(issuer))}: use that URL, else no client signs in"
        )


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


class NameForm(StrEnum):
    """The form in which tools are listed."""

    DOTTED = "dotted"
    DASHED = "dashed"


stdio_app = group("MCP on standard input and output.")


@stdio_app.command(epilog=example("relay stdio --url https://relay.example/mcp/kinds --token-file token"))
def stdio(
    url: Annotated[
        str,
        typer.Option(
            metavar="URL",
            help=f"The relay; behind it {KINDS_PATH} or {TOOLS_PATH} chooses a view with dashed names.",
        ),
    ],
    names: Annotated[
        NameForm | None,
        typer.Option(help="The form of tools' names; some clients reject dots. Default: dotted."),
    ] = None,
    view: Annotated[
        View | None,
        typer.Option(help="List each node's tools, or one tool of a kind. Default: the relay's."),
    ] = None,
    token_file: Annotated[Path | None, typer.Option(help="The file that holds the token, mode 0600.")] = None,
    root: remote.Root = None,
    plain: remote.Plain = False,
) -> None:
    """Be an MCP server on standard input and output. The token may also be in EDGE_TOKEN."""
    from relay.client.http import tls_by  # noqa: PLC0415 - as below
    from relay.client.stdio_bridge.bridge import run_stdio  # noqa: PLC0415 - the HTTP client, for this command alone

    relay, path = parse_mcp_url(url)
    if path != MCP_PATH and (names or view):
        fail(f"{path} in --url chooses names and view: leave out --names and --view", EXIT_USAGE)
    check_private_url(relay, plain_allowed=plain)
    try:
        token = RenewableToken.find(token_file, os.environ)
    except TokenMissingError as error:
        fail(str(error), EXIT_USAGE if token_file is None else EXIT_CANNOT_RUN)
    query = urlencode({name: value for name, value in (("names", names), ("view", view)) if value})
    run_stdio(f"{mcp_url(relay, path)}{query and '?'}{query}", token, tls_by(root), root, sys.stderr)
