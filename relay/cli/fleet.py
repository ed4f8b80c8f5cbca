"""``relay fleet``: what a running relay lists, in the terminal.

Reads by MCP, as an agent does. Without a token it signs one with the key of the state directory, for a minute
and for reading alone. Must not change anything.
"""

import asyncio
import json
import os
import ssl
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import aclosing
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
from relay.client.credentials import TOKEN_VARIABLE, RenewableToken, TokenMissingError
from relay.client.stdio_bridge.http_client import RelayHttp
from relay.fleet.facts import COLUMNS, FactForm
from relay.settings.config import StateFiles
from relay.settings.environment import now_ms
from relay.state.key_files import read_key
from relay.state.labels import with_typed_form
from schemas.addresses import check_private_url, mcp_url, parse_mcp_url
from schemas.error_roots import PeerError
from schemas.process.cli_manual import example, group
from schemas.process.command_errors import EXIT_CANNOT_RUN, EXIT_USAGE
from schemas.process.state_owner import as_operator
from schemas.registry import SchemaRegistry
from schemas.text import printable
from schemas.tls import client_context, read_root
from schemas.ulids import UlidSource

_VERSION = "2026-07-28"
_META = {
    "io.modelcontextprotocol/protocolVersion": _VERSION,
    "io.modelcontextprotocol/clientCapabilities": {},
}
_OK = 200


class FleetReadError(PeerError):
    """The relay did not answer with what was read; the text says why, printably."""


class FleetReader:
    """Reads from one relay."""

    def __init__(self, http: RelayHttp) -> None:
        self._http = http

    async def nodes(self) -> list[dict[str, Any]]:
        """Return the nodes of the token's tenant, as ``fleet://nodes`` has them.

        Raises:
            FleetReadError, NotSentError, LostError: they cannot be read.
        """
        return [node async for page in self._node_pages() for node in page]

    async def tools(self) -> list[dict[str, Any]]:
        """Return the entries of ``tools/list`` that the token reaches.

        In a fleet of several relays each has the ``relay`` that its node is connected to, as the nodes have.

        Raises:
            FleetReadError, NotSentError, LostError: they cannot be read.
        """
        tools = [tool async for tool in self._tools()]
        relays = await self._relays() if tools else {}
        return [
            tool | {"relay": relays[tool["name"]]} if tool.get("name") in relays else tool for tool in tools
        ]

    async def _relays(self) -> Mapping[str, str | None]:
        """Return the relay of each tool's node by the tool's name; empty if there is one relay."""
        found: dict[str, str | None] = {}
        try:
            async with aclosing(self._node_pages()) as pages:
                async for page in pages:
                    if not any("relay" in node for node in page):
                        break  # there is one relay, and the other pages say no more
                    found |= {name: node["relay"] for node in page for name in node["tools"]}
        except (KeyError, TypeError):
            raise FleetReadError("the relay's list of nodes is malformed") from None
        except FleetReadError:
            return {}  # a token may reach tools, and not read nodes
        return found

    async def _node_pages(self) -> AsyncGenerator[list[dict[str, Any]]]:
        uri = "fleet://nodes"
        while True:
            result = await self._result("resources/read", {"uri": uri}, uri)
            try:
                page = json.loads(result["contents"][0]["text"])
                nodes, following = list(page["nodes"]), page.get("nextCursor")
            except (KeyError, IndexError, TypeError, ValueError, AttributeError):
                raise FleetReadError("the relay's list of nodes is malformed") from None
            yield nodes
            if following is None:
                return
            uri = f"fleet://nodes?cursor={following}"

    async def _tools(self) -> AsyncIterator[dict[str, Any]]:
        params: dict[str, Any] = {}
        while True:
            result = await self._result("tools/list", params)
            try:
                for tool in result["tools"]:
                    yield tool
            except (KeyError, TypeError):
                raise FleetReadError("the relay's list of tools is malformed") from None
            if "nextCursor" not in result:
                return
            params = {"cursor": result["nextCursor"]}

    async def _result(
        self, method: str, params: Mapping[str, Any], name: str | None = None
    ) -> dict[str, Any]:
        message = {"jsonrpc": "2.0", "id": 1, "method": method, "params": {**params, "_meta": _META}}
        headers = {"mcp-protocol-version": _VERSION, "mcp-method": method}
        if name is not None:
            headers["mcp-name"] = name
        async with self._http.exchange("POST", headers, json.dumps(message).encode("ascii")) as response:
            if response.status != _OK:
                raise FleetReadError(f"the relay refuses: {(await response.read_refusal())[1]}")
            async with aclosing(response.messages()) as messages:
                async for _, value in messages:
                    if isinstance(value.get("result"), dict):
                        return dict(value["result"])
                    if isinstance(error := value.get("error"), dict):
                        raise FleetReadError(f"the relay refuses: {printable(str(error.get('message')))}")
        raise FleetReadError("the relay answered without a result")


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
    from relay.cli.fleet import FleetReader  # noqa: PLC0415
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


_FORMS: Mapping[FactForm, Callable[[Any], str]] = {
    FactForm.TEXT: str,
    FactForm.LABEL: lambda value: with_typed_form(str(value or "-")),
    FactForm.YES_NO: lambda value: "yes" if value else "no",
    FactForm.TIME: lambda value: utc(value) if isinstance(value, int) else "-",
    FactForm.COUNT: lambda value: str(len(value or ())),
    FactForm.WORDS: lambda value: " ".join(map(str, value or ())) or "-",
}


def _node_row(node: dict[str, Any]) -> Sequence[str]:
    return [_FORMS[form](node.get(member)) for _, member, form in COLUMNS]


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
    [header for header, _, _ in COLUMNS],
    _node_row,
)
_TOOLS = _View("tools", lambda reader: reader.tools(), ("TITLE", "NAME", "SAFETY CLASS"), _tool_row)
