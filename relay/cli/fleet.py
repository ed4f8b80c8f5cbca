"""What a running relay lists, in the terminal: for ``relay node list --live`` and ``relay fleet``.

Reads by MCP, as an agent does. Without a token it signs one with the key of the state directory, for a minute
and for reading alone. Must not change anything.
"""

import asyncio
import json
import os
import ssl
import sys
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import typer

from relay.auth.agent_tokens import TokenOptionError
from relay.cli import options
from relay.cli.exits import fail, run_until_stopped
from relay.cli.options import FleetOptions, show_table, state_files, tenant_name, utc
from relay.cli.state import authority
from relay.cli.tokens import signed
from relay.client.credentials import TOKEN_VARIABLE, RenewableToken, TokenMissingError
from relay.client.stdio_bridge.http_client import LostError, MisdirectedError, NotSentError, RelayHttp
from relay.fleet.facts import COLUMNS, FactForm
from relay.settings.config import StateFiles
from relay.state.key_files import read_key
from schemas.addresses import check_private_url, mcp_url, parse_mcp_url
from schemas.error_roots import PeerError
from schemas.errors import Failure
from schemas.labels import with_typed_form
from schemas.pacing import Backoff
from schemas.process.command_errors import EXIT_CANNOT_RUN, EXIT_USAGE
from schemas.process.interrupts import EXIT_STOPPED
from schemas.process.state_owner import as_operator
from schemas.text import printable
from schemas.tls import client_context, read_root

if TYPE_CHECKING:
    from relay.fleet.facts import ListedNode

_VERSION = "2026-07-28"
_META = {
    "io.modelcontextprotocol/protocolVersion": _VERSION,
    "io.modelcontextprotocol/clientCapabilities": {},
}
_OK = 200
_LONGEST_RETRY_MS = 5_000
MAX_PAGES = 10_000
"""Several gigabytes of a relay's lists; no fleet has as much."""
_TOKEN_TTL_S = 60
_WATCH_S = 2.0
_SUB = "relay-fleet"
_CLEAR = "\x1b[H\x1b[2J"


class FleetReadError(PeerError):
    """The relay did not answer with what was read; the text says why, printably."""


async def read_nodes(http: RelayHttp) -> "list[ListedNode]":
    """Return the nodes of the token's tenant, as ``fleet://nodes`` has them.

    Raises:
        FleetReadError, NotSentError, LostError: they cannot be read.
    """
    return [node async for page in _node_pages(http) for node in page]


async def read_tools(http: RelayHttp) -> list[dict[str, Any]]:
    """Return the entries of ``tools/list`` that the token reaches.

    In a fleet of several relays each has the ``relay`` that its node is connected to, as the nodes have.

    Raises:
        FleetReadError, NotSentError, LostError: they cannot be read.
    """
    tools: list[dict[str, Any]] = []
    params: dict[str, Any] = {}
    given = set[str]()
    while True:
        result = await _result(http, "tools/list", params)
        try:
            tools += [dict(each) for each in result["tools"]]
            following = _following(result, given)
        except (KeyError, TypeError, ValueError):
            raise FleetReadError("the relay's list of tools is malformed") from None
        if following is None:
            break
        params = {"cursor": following}
    relays = await _relay_of_each_tool(http) if tools else {}
    return [
        tool | {"relay": relays[name]} if (name := str(tool.get("name"))) in relays else tool
        for tool in tools
    ]


async def _relay_of_each_tool(http: RelayHttp) -> Mapping[str, str | None]:
    """Return the relay of each tool's node by the tool's name; empty if there is one relay."""
    found: dict[str, str | None] = {}
    try:
        async with aclosing(_node_pages(http)) as pages:
            async for page in pages:
                if not any("relay" in node for node in page):
                    break  # there is one relay, and the other pages say no more
                found |= {name: node["relay"] for node in page for name in node["tools"]}
    except (KeyError, TypeError):
        raise FleetReadError("the relay's list of nodes is malformed") from None
    except FleetReadError:
        return {}  # a token may reach tools, and not read nodes
    return found


async def _node_pages(http: RelayHttp) -> "AsyncGenerator[list[ListedNode]]":
    uri = "fleet://nodes"
    given = set[str]()
    while True:
        result = await _result(http, "resources/read", {"uri": uri}, uri)
        try:
            page = json.loads(result["contents"][0]["text"])
            nodes, following = list(page["nodes"]), _following(page, given)
        except (KeyError, IndexError, TypeError, ValueError, AttributeError):
            raise FleetReadError("the relay's list of nodes is malformed") from None
        yield nodes
        if following is None:
            return
        uri = f"fleet://nodes?cursor={following}"


def _following(page: Mapping[str, Any], given: set[str]) -> str | None:
    """Return the cursor of the page behind ``page``, if there is one, and add it to those ``given`` so far.

    Raises:
        FleetReadError: the list has no end.
    """
    cursor = page.get("nextCursor")
    if cursor in given or len(given) == MAX_PAGES:
        raise FleetReadError("the list has no end; is this a relay? --url says where it is")
    if cursor is not None:
        given.add(cursor)
    return cursor


async def _result(
    http: RelayHttp, method: str, params: Mapping[str, Any], name: str | None = None
) -> dict[str, Any]:
    """Return the result of a request; what the relay's rate limit refuses is asked again later."""
    message = {"jsonrpc": "2.0", "id": 1, "method": method, "params": {**params, "_meta": _META}}
    headers = {"mcp-protocol-version": _VERSION, "mcp-method": method}
    if name is not None:
        headers["mcp-name"] = name
    body = json.dumps(message).encode("ascii")
    waits = Backoff(0.1, 1.0)
    while True:
        answer = await _answer(http, headers, body)
        if isinstance(answer.get("result"), dict):
            return dict(answer["result"])
        error = answer["error"]
        data = error["data"] if isinstance(error.get("data"), dict) else {}
        wait_ms: Any = data.get("retry_after_ms")
        is_limited = data.get("code") == Failure.RATE_LIMITED.value.code and isinstance(wait_ms, int)
        if not (is_limited and 0 <= wait_ms <= _LONGEST_RETRY_MS):
            raise FleetReadError(f"the relay refuses: {printable(str(error.get('message')))}")
        await asyncio.sleep(wait_ms / 1000 + waits.next_s())


async def _answer(http: RelayHttp, headers: Mapping[str, str], body: bytes) -> dict[str, Any]:
    async with http.exchange("POST", headers, body) as response:
        if response.status != _OK:
            raise FleetReadError(f"the relay refuses: {(await response.read_refusal())[1]}")
        async with aclosing(response.messages()) as messages:
            async for _, value in messages:
                if isinstance(value.get("result"), dict) or isinstance(value.get("error"), dict):
                    return dict(value)
    raise FleetReadError("the relay answered without a result")


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


def _relay(given: FleetOptions, tenant: str | None, state_dir: Path | None) -> _Relay:
    state = state_files(state_dir)
    public = options.public_url(given.public_url, state)
    reached = parse_mcp_url(given.url)[0] if given.url is not None else public
    check_private_url(reached, plain_allowed=False)
    endpoint = f"{mcp_url(reached)}?view=tools"
    tls = client_context(_roots(given.root, state_dir), system_too=given.root is None)
    if given.token_file is not None or os.environ.get(TOKEN_VARIABLE):
        if tenant is not None:
            source = "--token-file" if given.token_file is not None else TOKEN_VARIABLE
            fail(f"--tenant and {source} exclude each other: a token is of one tenant", EXIT_USAGE)
        with as_operator():
            token = RenewableToken.find(given.token_file, os.environ)
        return _Relay(endpoint, tls, given.root, lambda: token, None)
    name = tenant_name(tenant, state)
    sign = partial(_signed, state, public, name)
    try:
        sign()  # so that a mistake is found before anything is sent
    except TokenOptionError as error:
        fail(f"--tenant is malformed: {error}", EXIT_USAGE)
    return _Relay(endpoint, tls, given.root, sign, name)


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
    _, token = signed(
        key, public_url, sub=_SUB, tenant=tenant, scopes=["tools:call:read_only"], ttl_s=_TOKEN_TTL_S
    )
    return RenewableToken(token)


class FleetView(NamedTuple):
    """One way to show a fleet: what the rows are, how they are read, and as which table they are shown."""

    noun: str
    read: Callable[[RelayHttp], Coroutine[Any, Any, Sequence[Mapping[str, Any]]]]
    header: Sequence[str]
    row: Callable[[Mapping[str, Any]], Sequence[str]]


def _finding(worst: Mapping[str, Any]) -> str:
    """Return the worst finding of a node, and how many there are besides."""
    more = f" +{worst['open'] - 1}" if worst["open"] > 1 else ""
    return f"{worst['severity']}: {worst['code']}{more}"


def _cell(form: FactForm, value: Any) -> str:  # noqa: PLR0911 - one for each form
    match form:
        case FactForm.TEXT:
            return str(value)
        case FactForm.LABEL:
            return with_typed_form(str(value or "-"))
        case FactForm.YES_NO:
            return "yes" if value else "no"
        case FactForm.TIME:
            return utc(value) if isinstance(value, int) else "-"
        case FactForm.COUNT:
            return str(len(value or ()))
        case FactForm.WORDS:
            return " ".join(map(str, value or ())) or "-"
        case FactForm.FINDING:
            return _finding(value) if isinstance(value, dict) else "-"


NODES = FleetView(
    "nodes",
    read_nodes,
    [header for header, _, _ in COLUMNS],
    lambda node: [_cell(form, node.get(member)) for _, member, form in COLUMNS],
)
TOOLS = FleetView(
    "tools",
    read_tools,
    ("TITLE", "NAME", "SAFETY CLASS"),
    lambda tool: (
        str(tool.get("title")),
        str(tool.get("name")),
        str((tool.get("annotations") or {}).get("x-safety-class", "-")),
    ),
)


def show(
    view: FleetView, given: FleetOptions, tenant: str | None, state_dir: Path | None, *, as_json: bool
) -> None:
    """Show ``view`` of the relay, once or whenever it has changed; end the command if it is not reached."""
    relay = _relay(given, tenant, state_dir)
    try:
        shown = run_until_stopped(_shown(view, relay, watch=given.watch, as_json=as_json))
    except NotSentError as error:
        # Some failures have advice of their own; else the address is wrong, or no relay is there.
        has_advice = isinstance(error, MisdirectedError)
        advice = "" if has_advice else "; is the relay running? --url says where it is"
        fail(f"{relay.url} is not reached: {error}{advice}", EXIT_CANNOT_RUN)
    except PeerError as error:
        fail(f"{relay.url}: {error}", EXIT_CANNOT_RUN)
    if shown is None and not given.watch:
        raise SystemExit(EXIT_STOPPED)


async def _shown(view: FleetView, relay: _Relay, *, watch: bool, as_json: bool) -> bool:
    """Show ``view`` and return True; with ``watch``, until cancelled."""
    shown: Sequence[Mapping[str, Any]] | None = None
    reported = ""
    while True:
        http = RelayHttp(relay.url, relay.token(), relay.tls, relay.root)
        try:
            rows = await view.read(http)
            reported = ""
        except (NotSentError, LostError) as error:
            if not watch:
                raise
            # The relay may be restarting; one line for each reason is enough.
            if str(error) != reported:
                reported = str(error)
                typer.echo(f"relay: {relay.url}: {reported}", err=True)
        else:
            if rows != shown:
                if watch and sys.stdout.isatty() and not as_json:
                    typer.echo(_CLEAR, nl=False)
                _print(view, rows, relay.tenant, as_json=as_json)
                shown = rows
        finally:
            await http.close()
        if not watch:
            return True
        await asyncio.sleep(_WATCH_S)


def _print(view: FleetView, rows: Sequence[Mapping[str, Any]], tenant: str | None, *, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(rows))
        return
    header = view.header
    try:
        cells = [view.row(row) for row in rows]
        if any("relay" in row for row in rows):
            # It is one of several relays: each row says which of them holds the node.
            header = (*header, "RELAY")
            cells = [(*each, str(row.get("relay") or "-")) for each, row in zip(cells, rows, strict=True)]
    except (AttributeError, KeyError, OSError, OverflowError, TypeError, ValueError):
        raise FleetReadError(f"the relay's list of {view.noun} is malformed") from None
    show_table(header, cells)
    if not rows:
        whose = "the token's tenant" if tenant is None else f"tenant {tenant}"
        typer.echo(f"relay: {whose} has no {view.noun}", err=True)
