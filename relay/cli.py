"""The command line of the relay.

Exit codes: 0 done; 1 the answer is no; 2 the command line is wrong; 3 it cannot run as things are (a file
is missing or exposed, a port is taken). Standard output holds results, standard error the rest. Must not
hold what the commands do: each calls one function of another module, imported when it is needed.
"""

import asyncio
import os
import re
import signal
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from relay.ca import AuthorityError, CertificateAuthority
from relay.config import DEFAULT_LISTEN, DEFAULT_PUBLIC_URL, RelayConfig, StateFiles, default_state_dir
from schemas.addresses import AddressError, is_loopback, mcp_url, normal_url, parse_host_port
from schemas.registry import ViolationError
from schemas.text import printable

EXIT_NO = 1
EXIT_USAGE = 2
EXIT_CANNOT_RUN = 3

app = typer.Typer(
    name="relay",
    help="The hub: shows what trusted nodes can do as MCP tools, and routes calls to them.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
ca_app = typer.Typer(help="The certificate authority that nodes are enrolled with.", no_args_is_help=True)
token_app = typer.Typer(help="Agents' bearer tokens.", no_args_is_help=True)
app.add_typer(ca_app, name="ca")
app.add_typer(token_app, name="token")

StateDir = Annotated[Path | None, typer.Option("--state-dir", help="Where the relay's state lies.")]
Tenant = Annotated[str, typer.Option(help="Whose it is.")]
PublicUrl = Annotated[str, typer.Option("--public-url", metavar="URL", help="The relay as others see it.")]


def main() -> None:
    """Run the command line, and say an error in one line."""
    try:
        app()
    except AddressError as error:
        _fail(str(error), EXIT_USAGE)
    except OSError as error:
        _fail(f"{error.filename}: {error.strerror}" if error.filename else str(error), EXIT_CANNOT_RUN)
    except AuthorityError as error:
        _fail(str(error), EXIT_CANNOT_RUN)


@ca_app.command("init")
def ca_init(state_dir: StateDir = None) -> None:
    """Make the root of trust. Once; it is never overwritten."""
    ca = _authority(state_dir)
    ca.create()
    typer.echo(ca.root_file)


@ca_app.command("issue")
def ca_issue(
    csr: Annotated[Path | None, typer.Argument(metavar="CSR", help="A node's certificate request.")] = None,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Where the leaf goes.")] = None,
    tenant: Tenant = "default",
    replace: Annotated[bool, typer.Option(help="Revoke the leaf that the node has.")] = False,
    mock: Annotated[
        int | None, typer.Option(min=1, max=100_000, help="Make N whole mock identities.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="The directory for --mock.")] = None,
    state_dir: StateDir = None,
) -> None:
    """Issue the leaf that a certificate request asks for, or mock identities for `kubelet fleet`."""
    ca = _authority(state_dir)
    if mock is not None:
        if csr is not None or out is None:
            _fail("--mock N goes with --out DIR, and without a CSR", EXIT_USAGE)
        node_ids = ca.issue_mock(mock, out, tenant)
        typer.echo(f"{len(node_ids)} identities in {out}", err=True)
        return
    if csr is None:
        _fail("name the CSR, or say --mock N --out DIR", EXIT_USAGE)
    if output is not None:
        output.touch()  # what cannot be written must be known before the ledger says that it was issued
    leaf = ca.issue(csr.read_text("utf-8", "replace"), tenant, replace=replace)
    if output is None:
        typer.echo(leaf, nl=False)
    else:
        output.write_text(leaf, "utf-8")
        typer.echo(f"{output}; its root is {ca.root_file}", err=True)


@token_app.command("issue")
def token_issue(
    sub: Annotated[str, typer.Option(help="Who will hold it; stands in the audit.")],
    tenant: Tenant = "default",
    scope: Annotated[
        list[str] | None, typer.Option(help="What it allows; repeat. Default: tools:call:read_only.")
    ] = None,
    ttl: Annotated[str, typer.Option(help="How long it is good for: 90s, 15m, 12h or 30d.")] = "12h",
    public_url: PublicUrl = DEFAULT_PUBLIC_URL,
    state_dir: StateDir = None,
) -> None:
    """Sign a token for an agent, and print it."""
    from relay.app import now_ms  # noqa: PLC0415 - the server's parts only when they are needed
    from relay.auth import SCOPES, TokenIssuer, load_or_create_token_key  # noqa: PLC0415
    from schemas.registry import SchemaRegistry  # noqa: PLC0415
    from schemas.ulids import UlidSource  # noqa: PLC0415

    scopes = scope or ["tools:call:read_only"]
    if unknown := [name for name in scopes if name not in SCOPES]:
        _fail(f"no such scope: {printable(unknown[0])}; there are {', '.join(SCOPES)}", EXIT_USAGE)
    url = normal_url(public_url)
    issuer = TokenIssuer(
        load_or_create_token_key(_state(state_dir).token_key), url, mcp_url(url), SchemaRegistry()
    )
    now = now_ms()
    try:
        token = issuer.issue(
            sub=sub,
            tenant=tenant,
            scopes=scopes,
            now_s=now // 1000,
            ttl_s=_seconds(ttl),
            jti=UlidSource(lambda: now, os.urandom).new(),
        )
    except ViolationError as error:
        _fail(f"--sub, --tenant or --ttl is not of its form: {error}", EXIT_USAGE)
    typer.echo(token)


@app.command()
def run(
    broker: Annotated[str, typer.Option(metavar="HOST:PORT", help="The MQTT broker.")],
    public_url: PublicUrl = DEFAULT_PUBLIC_URL,
    listen: Annotated[str, typer.Option(metavar="HOST:PORT", help="Where to serve.")] = DEFAULT_LISTEN,
    state_dir: StateDir = None,
) -> None:
    """Run the relay."""
    import uvloop  # noqa: PLC0415 - the server's parts only when they are needed

    from relay.app import bind, run_relay  # noqa: PLC0415

    address = parse_host_port(listen)
    if not is_loopback(address.host):
        _fail(
            f"{address} is open to others and this port speaks plain HTTP: put a TLS proxy in front",
            EXIT_USAGE,
        )
    config = RelayConfig(parse_host_port(broker), normal_url(public_url), address, _state(state_dir))
    with bind(address) as listener:
        _run_until_told(run_relay(config, listener, sys.stderr), uvloop.new_event_loop)


@app.command()
def demo(
    once: Annotated[bool, typer.Option("--once", help="End after the calls; exit 1 if one failed.")] = False,
    nodes: Annotated[int, typer.Option(min=0, max=5000, help="How many mock nodes.")] = 2,
    ready_file: Annotated[Path | None, typer.Option(help="Write JSON here once all is up.")] = None,
) -> None:
    """Start everything on this machine, call each tool once, and keep serving until Ctrl-C."""
    from relay.demo import DemoError, run_demo  # noqa: PLC0415

    failed: list[bool] = []

    async def show() -> None:
        failed.append(not await run_demo(nodes=nodes, once=once, ready_file=ready_file))

    try:
        _run_until_told(show(), asyncio.new_event_loop)
    except DemoError as error:
        _fail(str(error), EXIT_NO)
    if any(failed):
        raise SystemExit(EXIT_NO)


def _run_until_told(
    work: Coroutine[Any, Any, None], loop_factory: Callable[[], asyncio.AbstractEventLoop]
) -> None:
    """Run ``work`` until SIGINT or SIGTERM; a server that is told to stop has done its job."""

    async def supervised() -> None:
        task = asyncio.ensure_future(work)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, task.cancel)
        await asyncio.wait([task])
        if not task.cancelled():
            task.result()

    with asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(supervised())


def _state(state_dir: Path | None) -> StateFiles:
    return StateFiles(state_dir or default_state_dir(Path.home(), is_root=os.geteuid() == 0))


def _authority(state_dir: Path | None) -> CertificateAuthority:
    from relay.app import now_ms  # noqa: PLC0415

    return CertificateAuthority(_state(state_dir).ca, now_ms, os.urandom)


def _seconds(text: str) -> int:
    match = re.fullmatch(r"([1-9][0-9]{0,8})([smhd])", text)
    if match is None:
        _fail(f"{printable(text)!r} is not a duration: write 90s, 15m, 12h or 30d", EXIT_USAGE)
    return int(match[1]) * {"s": 1, "m": 60, "h": 3600, "d": 86400}[match[2]]


def _fail(text: str, code: int) -> NoReturn:
    typer.echo(f"relay: {text}", err=True)
    raise SystemExit(code)
