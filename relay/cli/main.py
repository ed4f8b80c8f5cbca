"""The command line of the relay: ``relay run``, ``relay demo``, and the groups of the other modules here.

Must not contain what the commands do: each calls one function. Must not import the server's parts: those are
imported by the command that needs them.
"""

import os
from pathlib import Path
from typing import Annotated

import typer

from relay.cli import (
    audit,
    backup,
    ca,
    config,
    connect,
    fleet,
    join_tokens,
    nodes,
    options,
    remote_tools,
    status,
    stdio,
    tokens,
)
from relay.cli.exits import EXIT_NO, fail
from relay.cli.settings_options import takes_settings
from relay.kept_settings import write_kept
from relay.settings import RELAY, LoadedSettings, load_settings
from schemas.error_roots import OperatorError
from schemas.settings_sources import Sources, read_sources

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
app.add_typer(config.app, name="config")
app.command()(status.status)
app.command()(connect.connect)
app.command(hidden=True)(connect.headers)
app.command()(stdio.stdio)
app.command()(remote_tools.tools)
app.command()(remote_tools.call)
ca.app.command("backup")(backup.ca_backup)
ca.app.command("restore")(backup.ca_restore)


@app.command()
@takes_settings(RELAY)
def run(sources: Sources) -> None:
    """Run the relay.

    Each option is also a setting: --listen is listen in relay.toml, and the variable RELAY_LISTEN.
    `relay config show` prints which value holds, and where it stands.
    """
    from relay.cli.serve import serve  # noqa: PLC0415 - the server's parts, for this command alone
    from relay.server.settings_reload import ReloadSource  # noqa: PLC0415 - as above

    def load() -> LoadedSettings:
        again = read_sources(RELAY, sources.flags, sources.named_file, os.environ)
        return load_settings(again, options.usual_state_dir())

    loaded = load_settings(sources, options.usual_state_dir())
    config = loaded.config()
    if config.state.ca.exists():
        # Not in a directory that is named by mistake: the next start would use what was kept there.
        write_kept(config.state.settings, loaded.to_keep())
    serve(config, ReloadSource(loaded.settings, load))


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
