"""What the commands that call an MCP server share: their options, and the guarded client made of them.

A file or program that was named and cannot be used is an error of the command, and none of the server.
Must not import the client before a command needs it: it takes half a second to load.
"""

import json
import os
import shlex
import shutil
import sys
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar
from urllib.parse import urlsplit

import typer

from relay.cli.exits import fail, run_until_stopped
from relay.client.connect import Machine
from relay.client.credentials import TOKEN_VARIABLE, Profile, check_token_file, keep_token, read_profile
from schemas.addresses import KINDS_PATH, PLAIN_OPTION
from schemas.error_roots import CommandLineError, OperatorError
from schemas.files import make_private_directory
from schemas.kinds import kind_name
from schemas.process.command_errors import EXIT_CANNOT_RUN, EXIT_USAGE
from schemas.process.interrupts import EXIT_STOPPED
from schemas.process.state_owner import home_directory, needed_home_directory
from schemas.settings import list_of
from schemas.text import printable, quoted

if TYPE_CHECKING:
    from contextlib import AbstractAsyncContextManager

    from relay.remote_tools import (
        HttpServer,
        Permissions,
        RemoteToolError,
        RemoteTools,
        Surveyed,
    )

_MEMBERS = (
    "reason",
    "retryable",
    "may_have_run",
    "suggested_fix",
    "code",
    "retry_after_ms",
    "correlation_id",
    "remote_correlation_id",
)
"""What is printed of an error for programs."""

ResultT = TypeVar("ResultT")

DEFAULT_URL = f"http://127.0.0.1:8700{KINDS_PATH}"
_RECORDS = "calls.jsonl"

_EXITS = {
    "ToolTimeout": 10,
    "ToolUnauthorized": 11,
    "ToolNotFound": 12,
    "ToolInvalidArguments": 13,
    "ToolProviderFailure": 14,
}

Root = Annotated[
    Path | None,
    typer.Option(
        "--root", metavar="FILE", help="The root of the server's certificate, PEM. Default: this machine's."
    ),
]
Plain = Annotated[bool, typer.Option(PLAIN_OPTION, help="Allow unencrypted connections to other machines.")]


def kept_token(where: str) -> Any:
    """Return the option of a token's file that, if it is not given, is kept in one at ``where``."""
    return typer.Option(
        metavar="FILE",
        help=f"The file of the bearer token, mode 0600. Default: {TOKEN_VARIABLE}, or a question; "
        f"it is then kept in a file {where}.",
    )


@dataclass(frozen=True, slots=True)
class RemoteOptions:
    """The options of commands that call an MCP server; ``takes_options`` gives them to a command."""

    url: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="The MCP server, over HTTP; a relay's needs no path. Default: that of `relay login`, "
            f"with its token and root; else {DEFAULT_URL}.",
        ),
    ] = None
    stdio: Annotated[
        str | None,
        typer.Option(metavar="COMMAND", help="Instead of --url: a server to start, spoken to over stdio."),
    ] = None
    token_file: Annotated[
        Path | None, typer.Option(help=f"The file of the bearer token, mode 0600. Default: {TOKEN_VARIABLE}.")
    ] = None
    root: Root = None
    certificate: Annotated[Path | None, typer.Option(help="The client certificate to present, PEM.")] = None
    key: Annotated[Path | None, typer.Option(help="Its key, PEM, mode 0600.")] = None
    verify_manifests: Annotated[
        Path | None,
        typer.Option(metavar="ROOT", help="Require tools that nodes of this root have signed."),
    ] = None
    kinds: Annotated[
        str,
        typer.Option(
            metavar="NAME,...", help="Kinds of installed packages that these manifests may contain."
        ),
    ] = ""
    trust_annotations: Annotated[
        bool, typer.Option("--trust-annotations", help="Believe the server's own statements about risk.")
    ] = False
    pins: Annotated[
        Path | None, typer.Option(help="The file that remembers each tool as it was first used.")
    ] = None
    audit: Annotated[Path | None, typer.Option(help="The file that records are appended to.")] = None
    plain: Plain = False
    anonymous: Annotated[
        bool, typer.Option("--anonymous", help="Allow calls of another machine without a credential.")
    ] = False

    def client(self, permissions: "Permissions") -> "AbstractAsyncContextManager[RemoteTools]":
        """Return the client of the server that is named.

        Raises:
            CommandLineError, OperatorError, OSError: the options do not go together, or what they name is not
                there.
        """
        from relay.remote_tools import RemoteTools, StdioServer  # noqa: PLC0415 - as above

        if (self.certificate is None) != (self.key is None):
            raise CommandLineError("--certificate and --key go together")
        server: HttpServer | StdioServer
        if self.stdio is not None:
            command, *arguments = _words(self.stdio)
            if shutil.which(command) is None:
                raise OperatorError(f"{printable(command)}: there is no such program")
            server = StdioServer(command, tuple(arguments))
        else:
            server = _http_server(self._with_profile())
        return RemoteTools(
            server,
            permissions=permissions,
            audit=self.audit or _own_file(_RECORDS),
            pins=self.pins or _own_file("pins.json"),
            verify_manifests=self.verify_manifests,
            kinds=list_of(kind_name)(self.kinds),
            trust_annotations=self.trust_annotations,
        )

    def _with_profile(self) -> "RemoteOptions":
        """Return the options with those of ``relay login`` where no server is named, or the usual one."""
        if self.url is not None:
            return self
        profile = kept_profile()
        if profile is None:
            return replace(self, url=DEFAULT_URL)
        return replace(
            self,
            url=profile.url,
            token_file=self.token_file or profile.token_file,
            root=self.root or profile.root,
            plain=self.plain or profile.plain,
        )


def profile_path() -> Path:
    """Return where the profile of ``relay login`` is kept."""
    return Machine(sys.platform, needed_home_directory(), os.environ).tokens / "profile.json"


def kept_profile() -> Profile | None:
    """Return the profile of ``relay login``; None if there is none, or no home directory for one."""
    return read_profile(profile_path()) if home_directory() is not None else None


@contextmanager
def new_token(path: Path, *, is_for_it: bool) -> Iterator[Path]:
    """Hold the file of a token that is to be tried, and keep that as ``path`` once the block has ended well.

    It is that of the environment, else what is kept already if it ``is_for_it``, for the same server, else
    the answer to a question.
    """
    given = os.environ.get(TOKEN_VARIABLE, "").strip()
    if not given and is_for_it and path.exists():
        check_token_file(path)
        yield path
        return
    if not given:
        if not sys.stdin.isatty():
            fail(f"there is no token: give one with --token-file, or in {TOKEN_VARIABLE}", EXIT_USAGE)
        given = str(typer.prompt("Token of the agent (relay token issue)", hide_input=True))
    new = path.with_name(f"{path.name}.new")
    new.unlink(missing_ok=True)
    keep_token(new, given)
    try:
        yield new
        new.replace(path)
    finally:
        new.unlink(missing_ok=True)


async def survey(options: RemoteOptions, accept: str | None = None) -> "list[Surveyed]":
    """Return the tools of a server, and what a call would be refused for; first pin the one to ``accept``."""
    from relay.remote_tools import Permissions, Risk  # noqa: PLC0415 - for a command that runs

    async with options.client(Permissions(("*",), Risk.ADMIN, scopes=None)) as client:
        if accept is not None:
            await client.accept(accept)
        return await client.survey()


def with_path(url: str) -> str:
    """Return ``url`` with the path of a relay's kinds view if it has none.

    >>> with_path("https://relay.example")
    'https://relay.example/mcp/kinds'
    """
    try:
        bare = urlsplit(url).path in {"", "/"} and "?" not in url
    except ValueError:
        return url
    return url.rstrip("/") + KINDS_PATH if bare else url


def _http_server(options: RemoteOptions) -> "HttpServer":
    from relay.client.http import tls_by  # noqa: PLC0415 - for a command that runs
    from relay.remote_tools import BearerToken, HttpServer  # noqa: PLC0415 - as above

    shown = (options.certificate, options.key) if options.certificate and options.key else None
    # Made here for its errors alone; the client makes it again, of files that are renewed too.
    tls_by(options.root, shown)
    if options.token_file is not None:
        token: Path | str = check_token_file(options.token_file)
    else:
        token = os.environ.get(TOKEN_VARIABLE, "").strip()
    return HttpServer(
        with_path(options.url or DEFAULT_URL),
        BearerToken(token) if token else None,
        client_certificate=shown,
        root=options.root,
        plain_allowed=options.plain,
        anonymous=options.anonymous,
    )


def run_command(work: "Coroutine[Any, Any, ResultT]", *, as_json: bool) -> ResultT:
    """Run ``work``; print an error of a remote call, and exit with the code of its type.

    A signal cancels it, so that the server that it has started ends, and the end of its call is recorded.
    """
    import logging  # noqa: PLC0415 - with the import below

    from relay.remote_tools import AuditFailedError, RemoteToolError  # noqa: PLC0415 - as above

    # The SDK logs what a server sent, with tracebacks; the error says what is wrong.
    for name in ("mcp", "client", "relay.remote_tools"):
        logging.getLogger(name).addHandler(logging.NullHandler())
        logging.getLogger(name).propagate = False

    async def answer() -> tuple[ResultT]:
        return (await work,)

    try:
        answered = run_until_stopped(answer())
    except RemoteToolError as error:
        _show_error(error, as_json=as_json)
        raise SystemExit(_EXITS[type(error).__name__]) from None
    except AuditFailedError as error:
        fail(str(error), EXIT_CANNOT_RUN)
    if answered is None:
        raise SystemExit(EXIT_STOPPED)
    return answered[0]


def _show_error(error: "RemoteToolError", *, as_json: bool) -> None:
    if as_json:
        document = {
            "error": type(error).__name__,
            "message": str(error),
            **{name: getattr(error, name) for name in _MEMBERS},
        }
        typer.echo(json.dumps({name: value for name, value in document.items() if value is not None}))
    code = f" [{error.code}]" if error.code is not None else ""
    # What the message holds of a server's text is printable already.
    typer.echo(f"relay: {type(error).__name__}{code}: {error}\n  {error.suggested_fix}", err=True)
    if error.correlation_id:
        typer.echo(f"  correlation id {error.correlation_id}", err=True)


def _words(command: str) -> list[str]:
    try:
        words = shlex.split(command)
    except ValueError:
        words = []
    if not words:
        raise CommandLineError(f"{quoted(command)} is not a command")
    return words


def own_records() -> Path | None:
    """Return the file to which this user's commands append their records; None if there is none yet."""
    path = _own_directory() / _RECORDS if home_directory() is not None else None
    return path if path is not None and path.exists() else None


def _own_directory() -> Path:
    base = os.environ.get("XDG_STATE_HOME") or str(needed_home_directory() / ".local" / "state")
    return Path(base) / "edge-remote-tools"


def _own_file(name: str) -> Path:
    make_private_directory(_own_directory())
    return _own_directory() / name
