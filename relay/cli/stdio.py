"""``relay stdio``: MCP for clients that start a process instead of opening a connection.

Must not print anything on standard output, which carries the protocol.
"""

import os
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated
from urllib.parse import urlencode

import typer

from relay.cli.exits import fail
from relay.cli.remote_server import Plain, Root
from relay.client.credentials import RenewableToken, TokenMissingError
from relay.settings.config import View
from schemas.addresses import (
    KINDS_PATH,
    MCP_PATH,
    TOOLS_PATH,
    check_private_url,
    mcp_url,
    parse_mcp_url,
)
from schemas.process.cli_manual import example, group
from schemas.process.command_errors import EXIT_CANNOT_RUN, EXIT_USAGE


class NameForm(StrEnum):
    """The form in which tools are listed."""

    DOTTED = "dotted"
    DASHED = "dashed"


app = group("MCP on standard input and output.")


@app.command(epilog=example("relay stdio --url https://relay.example/mcp/kinds --token-file token"))
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
    root: Root = None,
    plain: Plain = False,
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
