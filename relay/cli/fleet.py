"""``relay fleet``: what a running relay lists, in the terminal.

Reads by MCP, as an agent does. Without a token it signs one with the key of the state directory, for a minute
and for reading alone. Must not change anything.
"""

import asyncio
import json
import os
import ssl
import sys
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from relay.auth.agent_tokens import TokenIssuer, TokenOptionError
from relay.cli import options
from relay.cli.event_loop import run_until_stopped
from relay.cli.exits import fail
from relay.cli.options import AsJson, PublicUrl, StateDir, Tenant, show_table, state_files, tenant_name, utc
from relay.cli.state import authority
from relay.client.stdio_bridge.bearer_token import TOKEN_VARIABLE, RenewableToken, TokenMissingError
from relay.settings.config import StateFiles
from relay.settings.environment import now_ms
from relay.state.key_files import read_key
from relay.state.labels import with_typed_form
from schemas.addresses import check_private_url, mcp_url, parse_mcp_url
from schemas.error_roots import PeerError
from schemas.process.cli_manual import example, group
from schemas.process.exit_codes import EXIT_CANNOT_RUN, EXIT_USAGE
from schemas.process.state_owner import as_operator
from schemas.registry import SchemaRegistry
from schemas.tls import client_context, read_root
from schemas.ulids import UlidSource

app = group("What a running relay lists: nodes and tools.")

_TOKEN_TTL_S = 60
_WATCH_S = 2.0
_SUB = "relay-fleet"
_CLEAR = "\x1b[H\x1b[2J"

Url = Annotated[
    str | None,
    typer.Option("--url", metavar="URL", help="Where the relay is reached. Default: its public URL."),
]
TokenFile = Annotated[
    Path | None,
    typer.Option(
        help=f"The file of a bearer token, mode 0600; or in {TOKEN_VARIABLE}. Default: one is signed."
    ),
]
Root = Annotated[
    Path | None,
    typer.Option(
        "--root", metavar="FILE", help="The root of the relay's certificate, PEM. Default: its own CA's too."
    ),
]
Watch = Annotated[bool, typer.Option("--watch", help="Show it again when it has changed, until Ctrl-C.")]

Rows = list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class _View:
    """One way to show a fleet: how it is read, and as which table."""

    noun: str
    read: Callable[[Any], Coroutine[Any, Any, Rows]]
    header: Sequence[str]
    row: Callable[[dict[str, Any]], Sequence[str]]


@app.command("nodes", epilog=example("relay fleet nodes --watch"))
def fleet_nodes(
    tenant: Tenant = None,
    url: Url = None,
    token_file: TokenFile = None,
    root: Root = None,
    watch: Watch = False,
    as_json: AsJson = False,
    public_url: PublicUrl = None,
    state_dir: StateDir = None,
) -> None:
    """Show the nodes of a tenant: which are connected, and until when their manifests are valid."""
    _show(_NODES, _relay(tenant, url, token_file, root, public_url, state_dir), watch=watch, as_json=as_json)


@app.command("tools", epilog=example("relay fleet tools --tenant acme --json"))
def fleet_tools(
    tenant: Tenant = None,
    url: Url = None,
    token_file: TokenFile = None,
    root: Root = None,
    watch: Watch = False,
    as_json: AsJson = False,
    public_url: PublicUrl = None,
    state_dir: StateDir = None,
) -> None:
    """Show the tools that an agent of a tenant reads in the relay's list."""
    _show(_TOOLS, _relay(tenant, url, token_file, root, public_url, state_dir), watch=watch, as_json=as_json)


@dataclass(frozen=True, slots=True)
class _Relay:
    """A relay, and what it is spoken to with. ``token`` returns one that is good for a minute at least.

    ``tenant`` is that of a token that is signed here; None for one that was given.
    """

    url: str
    tls: ssl.SSLContext
    root: Path | None
    token: Callable[[], RenewableToken]
    tenant: str | None


def _relay(
    tenant: str | None,
    url: str | None,
    token_file: Path | None,
    root: Path | None,
    public_url: str | None,
    state_dir: Path | None,
) -> _Relay:
    state = state_files(state_dir)
    public = options.public_url(public_url, state)
    reached = parse_mcp_url(url)[0] if url is not None else public
    check_private_url(reached, plain_allowed=False)
    endpoint = f"{mcp_url(reached)}?view=tools"
    tls = client_context(_roots(root, state_dir), system_too=root is None)
    if token_file is not None or os.environ.get(TOKEN_VARIABLE):
        if tenant is not None:
            source = "--token-file" if token_file is not None else TOKEN_VARIABLE
            fail(f"--tenant and {source} exclude each other: a token is of one tenant", EXIT_USAGE)
        with as_operator():
            given = RenewableToken.find(token_file, os.environ)
        return _Relay(endpoint, tls, root, lambda: given, None)
    name = tenant_name(tenant, state)
    signed = partial(_signed, state, public, name)
    try:
        signed()  # so that a mistake is found before anything is sent
    except TokenOptionError as error:
        fail(f"--tenant is malformed: {error}", EXIT_USAGE)
    return _Relay(endpoint, tls, root, signed, name)


def _roots(named: Path | None, state_dir: Path | None) -> str | None:
    """Return the roots that were named, or those of the CA of the state directory, if there is one."""
    if named is not None:
        with as_operator():
            return read_root(named)
    servers = authority(state_dir).servers
    return "".join(servers.roots()) if servers.exist() else None


def _signed(state: StateFiles, public_url: str, tenant: str) -> RenewableToken:
    """Return a token for reading, signed with the key of the state directory.

    Raises:
        TokenMissingError: there is no key.
        TokenOptionError: the tenant is malformed.
    """
    try:
        key = read_key(state.token_key)
    except FileNotFoundError:
        raise TokenMissingError(
            f"{state.token_key} is missing: run this where agents' tokens are issued, or give a token"
        ) from None
    now = now_ms()
    return RenewableToken(
        TokenIssuer(key, public_url, mcp_url(public_url), SchemaRegistry()).issue(
            sub=_SUB,
            tenant=tenant,
            scopes=["tools:call:read_only"],
            now_s=now // 1000,
            ttl_s=_TOKEN_TTL_S,
            jti=UlidSource(lambda: now, os.urandom).new(),
        )
    )


def _show(view: _View, relay: _Relay, *, watch: bool, as_json: bool) -> None:
    from relay.client.stdio_bridge.http_client import MisdirectedError, NotSentError  # noqa: PLC0415 - as in ``_read``

    show = _watched if watch else _once
    try:
        run_until_stopped(show(view, relay, as_json=as_json))
    except NotSentError as error:
        # Some failures have advice of their own; else the address is wrong, or no relay is there.
        advice = (
            "" if isinstance(error, MisdirectedError) else "; is the relay running? --url says where it is"
        )
        fail(f"{relay.url} is not reached: {error}{advice}", EXIT_CANNOT_RUN)
    except PeerError as error:
        fail(f"{relay.url}: {error}", EXIT_CANNOT_RUN)


async def _once(view: _View, relay: _Relay, *, as_json: bool) -> None:
    _print(view, await _read(view, relay), relay.tenant, as_json=as_json)


async def _watched(view: _View, relay: _Relay, *, as_json: bool) -> None:
    from relay.client.stdio_bridge.http_client import LostError, NotSentError  # noqa: PLC0415 - as in ``_read``

    shown: Rows | None = None
    reported = ""
    while True:
        try:
            rows = await _read(view, relay)
            reported = ""
        except (NotSentError, LostError) as error:
            # The relay may be restarting; one line for each reason is enough.
            if str(error) != reported:
                reported = str(error)
                typer.echo(f"relay: {relay.url}: {reported}", err=True)
        else:
            if rows != shown:
                if sys.stdout.isatty() and not as_json:
                    typer.echo(_CLEAR, nl=False)
                _print(view, rows, relay.tenant, as_json=as_json)
                shown = rows
        await asyncio.sleep(_WATCH_S)


async def _read(view: _View, relay: _Relay) -> Rows:
    # The HTTP client is loaded for these commands alone.
    from relay.cli.fleet_reader import FleetReader  # noqa: PLC0415
    from relay.client.stdio_bridge.http_client import RelayHttp  # noqa: PLC0415

    http = RelayHttp(relay.url, relay.token(), relay.tls, relay.root)
    try:
        return await view.read(FleetReader(http))
    finally:
        await http.close()


def _print(view: _View, rows: Rows, tenant: str | None, *, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(rows))
    else:
        show_table(*_with_relays(view.header, [view.row(row) for row in rows], rows))
        if not rows:
            whose = "the token's tenant" if tenant is None else f"tenant {tenant}"
            typer.echo(f"relay: {whose} has no {view.noun}", err=True)


def _with_relays(
    header: Sequence[str], shown: Sequence[Sequence[str]], rows: Rows
) -> tuple[Sequence[str], Sequence[Sequence[str]]]:
    """Return a table with one more column, if the rows say which relay of several holds a node."""
    if not any("relay" in row for row in rows):
        return header, shown
    held_by = [str(row.get("relay") or "-") for row in rows]
    return (*header, "RELAY"), [(*cells, relay) for cells, relay in zip(shown, held_by, strict=True)]


def _node_row(node: dict[str, Any]) -> Sequence[str]:
    expires = node.get("expires_at_ms")
    return (
        with_typed_form(str(node.get("label") or "-")),
        str(node.get("node_id")),
        "yes" if node.get("connected") else "no",
        utc(expires) if isinstance(expires, int) else "-",
        str(len(node.get("tools") or ())),
        " ".join(map(str, node.get("tags") or ())) or "-",
    )


def _tool_row(tool: dict[str, Any]) -> Sequence[str]:
    annotations = tool.get("annotations") or {}
    return (
        str(tool.get("title")),
        str(tool.get("name")),
        str(annotations.get("x-safety-class", "-")),
    )


_NODES = _View(
    "nodes",
    lambda reader: reader.nodes(),
    ("LABEL", "NODE", "ONLINE", "VALID UNTIL (UTC)", "TOOLS", "TAGS"),
    _node_row,
)
_TOOLS = _View("tools", lambda reader: reader.tools(), ("TITLE", "NAME", "SAFETY CLASS"), _tool_row)
