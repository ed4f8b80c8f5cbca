"""The command line of the relay: ``relay run``, ``relay demo``, and the groups of the other modules here.

Must not contain what the commands do: each calls one function. Must not import the server's parts: those are
imported by the command that needs them.
"""

from pathlib import Path
from typing import Annotated

import typer

from relay.cli import audit, backup, ca, fleet, join_tokens, nodes, options, remote_tools, stdio, tokens
from relay.cli.exits import EXIT_NO, EXIT_USAGE, fail
from relay.cli.options import PublicUrl, StateDir, state_files
from relay.config import (
    AGENT_BURST_S,
    CALLER_TIMEOUT_S,
    DEFAULT_LISTEN,
    PER_AGENT,
    EnvelopeMode,
    ExternalIssuerConfig,
    RelayConfig,
    TlsFiles,
    View,
)
from relay.kept_settings import KeptSettings, read_kept, write_kept
from relay.rate_limits import Allowance
from schemas.addresses import PLAIN_OPTION, parse_broker, parse_host_port
from schemas.error_roots import OperatorError

app = typer.Typer(
    name="relay",
    help="The hub: shows what trusted nodes can do as MCP tools, and routes calls to them.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
app.add_typer(ca.app, name="ca")
app.add_typer(join_tokens.app, name="join-token")
app.add_typer(nodes.app, name="node")
app.add_typer(fleet.app, name="fleet")
app.add_typer(tokens.app, name="token")
app.add_typer(audit.app, name="audit")
app.command()(stdio.stdio)
app.command()(remote_tools.tools)
app.command()(remote_tools.call)
ca.app.command("backup")(backup.ca_backup)
ca.app.command("restore")(backup.ca_restore)


@app.command()
def run(
    broker: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="The MQTT broker. Default: as given before.")
    ] = None,
    public_url: PublicUrl = None,
    listen: Annotated[str, typer.Option(metavar="HOST:PORT", help="Where to serve.")] = DEFAULT_LISTEN,
    jwks: Annotated[
        str | None, typer.Option(metavar="URL", help="The keys of another issuer of agents' tokens.")
    ] = None,
    issuer: Annotated[str | None, typer.Option(metavar="ISS", help="That issuer, as in its tokens.")] = None,
    tls_certificate: Annotated[
        Path | None, typer.Option(help="Serve over TLS with this certificate, PEM.")
    ] = None,
    tls_key: Annotated[Path | None, typer.Option(help="Its key, PEM, mode 0600.")] = None,
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
        Path | None,
        typer.Option(help="The broker's pid file: SIGHUP when access lists change."),
    ] = None,
    agent_rps: Annotated[
        float, typer.Option(min=1, help="Calls that one agent may make a second.")
    ] = PER_AGENT.rate,
    agent_concurrency: Annotated[
        int, typer.Option(min=1, help="Calls that one agent may have in flight.")
    ] = PER_AGENT.concurrency,
    caller_timeout: Annotated[
        float,
        typer.Option(min=1, max=3600, help="Seconds that a caller has to answer for a tool that it lends."),
    ] = CALLER_TIMEOUT_S,
    envelope: Annotated[
        EnvelopeMode, typer.Option(help="What to do about a call whose envelope is malformed.")
    ] = EnvelopeMode.ENFORCE,
    default_view: Annotated[
        View,
        typer.Option(help="What clients see without ?view=: each node's tools, or one of a kind."),
    ] = View.TOOLS,
    plain: Annotated[
        bool,
        typer.Option(
            PLAIN_OPTION, help="Allow connections without TLS: others on the network can read and write."
        ),
    ] = False,
    state_dir: StateDir = None,
) -> None:
    """Run the relay."""
    from relay.cli.serve import serve  # noqa: PLC0415 - the server's parts, for this command alone

    state = state_files(state_dir)
    url = options.public_url(public_url, state)
    kept = read_kept(state.settings)
    if broker is None:
        # Kept together: the way of nodes to another broker is no way to this one.
        broker, node_broker = kept.broker, node_broker or kept.node_broker
    if broker is None:
        fail("name the MQTT broker with --broker HOST:PORT; it is kept for later starts", EXIT_USAGE)
    if (jwks is None) != (issuer is None):
        fail("--jwks and --issuer go together: the URL of the keys, and their issuer", EXIT_USAGE)
    external = None if jwks is None or issuer is None else ExternalIssuerConfig.parse(issuer, jwks, url)
    if tls_own and (tls_certificate or tls_key):
        fail("--tls-own and --tls-certificate exclude each other", EXIT_USAGE)
    config = RelayConfig(
        parse_broker(broker),
        url,
        parse_host_port(listen),
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
        default_view=default_view,
        caller_timeout_s=caller_timeout,
        per_agent=Allowance(agent_rps, agent_rps * AGENT_BURST_S, agent_concurrency),
    )
    if state.ca.exists():
        # Not in a directory that is named by mistake: the next start would use what was kept there.
        write_kept(state.settings, KeptSettings(url, broker, node_broker, kept.tenant))
    serve(config)


@app.command()
def demo(
    once: Annotated[bool, typer.Option("--once", help="End after the calls; exit 1 if one failed.")] = False,
    nodes: Annotated[int, typer.Option(min=0, max=5000, help="How many mock nodes.")] = 2,
    ready_file: Annotated[Path | None, typer.Option(help="Write JSON here once all is up.")] = None,
    caller_tools: Annotated[
        bool,
        typer.Option("--caller-tools", help="Show how an agent lends a tool to a node, instead."),
    ] = False,
) -> None:
    """Start everything on this machine, call each tool once, and keep serving until Ctrl-C."""
    from relay.cli.event_loop import run_until_stopped  # noqa: PLC0415 - with the import below
    from relay.demo.run import run_demo  # noqa: PLC0415 - MCP's client, for this command alone

    shown = run_demo(nodes=nodes, once=once, ready_file=ready_file, caller_tools=caller_tools)
    try:
        worked = run_until_stopped(shown)
    except OperatorError as error:
        fail(str(error), EXIT_NO)
    if worked is False:
        raise SystemExit(EXIT_NO)


def _tls_files(certificate: Path | None, key: Path | None) -> TlsFiles | None:
    if certificate is not None and key is not None:
        return TlsFiles(certificate, key)
    if certificate is not None or key is not None:
        fail("--tls-certificate and --tls-key go together", EXIT_USAGE)
    return None
