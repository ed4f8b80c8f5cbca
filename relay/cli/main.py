"""The command line of the relay: what runs, and the groups of ``relay.commands``.

Must not hold what the commands do: each calls one function of another module, imported when it is needed.
"""

import asyncio
import signal
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Annotated, Any

import typer

from relay.cli import audit, backup, ca, join_tokens, stdio, tokens
from relay.cli.options import (
    EXIT_CANNOT_RUN,
    EXIT_NO,
    EXIT_USAGE,
    PublicUrl,
    StateDir,
    fail,
    state_files,
)
from relay.config import (
    AGENT_BURST_S,
    DEFAULT_LISTEN,
    DEFAULT_PUBLIC_URL,
    PER_AGENT,
    EnvelopeMode,
    ExternalIssuerConfig,
    RelayConfig,
    TlsFiles,
)
from relay.ledger import LedgerError
from relay.pki.authority import AuthorityError
from relay.rate_limits import Allowance
from schemas.addresses import PLAIN_OPTION, AddressError, normal_url, parse_broker, parse_host_port
from schemas.faults import FailedError

app = typer.Typer(
    name="relay",
    help="The hub: shows what trusted nodes can do as MCP tools, and routes calls to them.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
app.add_typer(ca.app, name="ca")
app.add_typer(join_tokens.app, name="join-token")
app.add_typer(tokens.app, name="token")
app.add_typer(audit.app, name="audit")
app.command()(stdio.stdio)
ca.app.command("backup")(backup.ca_backup)
ca.app.command("restore")(backup.ca_restore)


def main() -> None:
    """Run the command line, and say an error in one line."""
    try:
        app()
    except AddressError as error:
        fail(str(error), EXIT_USAGE)
    except OSError as error:
        fail(f"{error.filename}: {error.strerror}" if error.filename else str(error), EXIT_CANNOT_RUN)
    except (AuthorityError, LedgerError) as error:
        fail(str(error), EXIT_CANNOT_RUN)


@app.command()
def run(
    broker: Annotated[str, typer.Option(metavar="HOST:PORT", help="The MQTT broker.")],
    public_url: PublicUrl = DEFAULT_PUBLIC_URL,
    listen: Annotated[str, typer.Option(metavar="HOST:PORT", help="Where to serve.")] = DEFAULT_LISTEN,
    jwks: Annotated[
        str | None, typer.Option(metavar="URL", help="The keys of another issuer of agents' tokens.")
    ] = None,
    issuer: Annotated[str | None, typer.Option(metavar="ISS", help="That issuer, as in its tokens.")] = None,
    tls_certificate: Annotated[
        Path | None, typer.Option(help="Serve over TLS with this certificate, PEM.")
    ] = None,
    tls_key: Annotated[Path | None, typer.Option(help="Its key, PEM; nobody else may read it.")] = None,
    tls_own: Annotated[
        bool, typer.Option("--tls-own", help="Serve over TLS with a certificate of the relay's own CA.")
    ] = False,
    broker_ca: Annotated[
        Path | None, typer.Option(help="The root of the broker's certificate, PEM. Default: that of the CA.")
    ] = None,
    node_broker: Annotated[
        str | None, typer.Option(metavar="URL", help="The broker as nodes reach it. Default: --broker.")
    ] = None,
    broker_directory: Annotated[
        Path | None,
        typer.Option(help="Where to write what the broker reads. Default: with the state."),
    ] = None,
    broker_pid_file: Annotated[
        Path | None, typer.Option(help="Where to find the broker, to tell it of new access lists.")
    ] = None,
    agent_rps: Annotated[
        float, typer.Option(min=1, help="Calls that one agent may make a second.")
    ] = PER_AGENT.rate,
    agent_concurrency: Annotated[
        int, typer.Option(min=1, help="Calls that one agent may have under way.")
    ] = PER_AGENT.concurrency,
    envelope: Annotated[
        EnvelopeMode, typer.Option(help="What to do about a call whose envelope is not of the form.")
    ] = EnvelopeMode.ENFORCE,
    plain: Annotated[
        bool, typer.Option(PLAIN_OPTION, help="Let others on the network read along, and write.")
    ] = False,
    state_dir: StateDir = None,
) -> None:
    """Run the relay."""
    import uvloop  # noqa: PLC0415 - the server's parts only when they are needed

    from relay.http.listener import bind  # noqa: PLC0415
    from relay.server.app import run_relay  # noqa: PLC0415

    address = parse_host_port(listen)
    url = normal_url(public_url)
    if (jwks is None) != (issuer is None):
        fail("--jwks and --issuer go together: the keys, and whose they are", EXIT_USAGE)
    external = None if jwks is None or issuer is None else ExternalIssuerConfig.parse(issuer, jwks, url)
    state = state_files(state_dir)
    if tls_own and (tls_certificate or tls_key):
        fail("--tls-own is one certificate, --tls-certificate another: say one of them", EXIT_USAGE)
    config = RelayConfig(
        parse_broker(broker),
        url,
        address,
        state,
        external_issuer=external,
        tls=state.own_tls if tls_own else _tls_files(tls_certificate, tls_key),
        own_root=tls_own,
        plain_allowed=plain,
        broker_ca=broker_ca,
        broker_directory=broker_directory,
        broker_pid_file=broker_pid_file,
        node_broker=parse_broker(node_broker) if node_broker else None,
        envelope_mode=envelope,
        per_agent=Allowance(agent_rps, agent_rps * AGENT_BURST_S, agent_concurrency),
    )
    with bind(address) as listener:
        try:
            _run_until_told(run_relay(config, listener, sys.stderr), uvloop.new_event_loop)
        except FailedError as error:
            fail(str(error), EXIT_CANNOT_RUN)


@app.command()
def demo(
    once: Annotated[bool, typer.Option("--once", help="End after the calls; exit 1 if one failed.")] = False,
    nodes: Annotated[int, typer.Option(min=0, max=5000, help="How many mock nodes.")] = 2,
    ready_file: Annotated[Path | None, typer.Option(help="Write JSON here once all is up.")] = None,
) -> None:
    """Start everything on this machine, call each tool once, and keep serving until Ctrl-C."""
    from relay.demo.run import DemoError, run_demo  # noqa: PLC0415

    failed: list[bool] = []

    async def show() -> None:
        failed.append(not await run_demo(nodes=nodes, once=once, ready_file=ready_file))

    try:
        _run_until_told(show(), asyncio.new_event_loop)
    except DemoError as error:
        fail(str(error), EXIT_NO)
    if any(failed):
        raise SystemExit(EXIT_NO)


def _tls_files(certificate: Path | None, key: Path | None) -> TlsFiles | None:
    if certificate is not None and key is not None:
        return TlsFiles(certificate, key)
    if certificate is not None or key is not None:
        fail("--tls-certificate and --tls-key go together", EXIT_USAGE)
    return None


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
