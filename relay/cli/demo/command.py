"""``relay demo``: everything on this machine. Must not hold what the demo does."""

from pathlib import Path
from typing import Annotated

import typer

from relay.cli.exits import fail
from schemas.error_roots import OperatorError
from schemas.kinds import RFC_0001, kind_name, shipped_names
from schemas.process.cli_manual import example, group
from schemas.process.command_errors import EXIT_NO
from schemas.process.interrupts import EXIT_STOPPED
from schemas.settings import list_of

_MOCK_NODES = 2
_HEALTH = "linux.health"

app = group("Show everything on this machine.")


@app.command(epilog=example("relay demo --nodes 10", "relay demo --relays 3", "relay demo --kinds all"))
def demo(
    once: Annotated[
        bool, typer.Option("--once", help="End after what it shows; exit 1 if something failed.")
    ] = False,
    nodes: Annotated[
        int | None,
        typer.Option(min=0, max=5000, help="How many mock nodes. Default: 2; with several relays, none."),
    ] = None,
    relays: Annotated[
        int,
        typer.Option(min=1, max=5, help="How many relays share the fleet; each further one has a mock node."),
    ] = 1,
    ready_file: Annotated[Path | None, typer.Option(help="Write JSON here once all is up.")] = None,
    caller_tools: Annotated[
        bool,
        typer.Option("--caller-tools", help="Show how an agent lends a tool to a node, instead."),
    ] = False,
    kinds: Annotated[
        str | None,
        typer.Option(
            metavar="all|none|NAME,...",
            help="Kinds that this machine has too, and that are called. Default: it has all that ship, and"
            f" of them {_HEALTH} is called.",
        ),
    ] = None,
) -> None:
    """Start all of it on this machine, call tools of up to 32 nodes, try what is refused, and serve."""
    from relay.cli.demo.run import run_demo  # noqa: PLC0415 - MCP's client, for this command alone
    from relay.cli.exits import run_until_stopped  # noqa: PLC0415 - with the import below
    from schemas.registry import read_contract  # noqa: PLC0415 - the validator, as above

    shipped = tuple(name for name in shipped_names() if name not in RFC_0001)
    match kinds:
        case None | "all":
            named = shipped
        case "none":
            named = ()
        case _:
            named = list_of(kind_name)(kinds)
    read_contract(named)
    mocks = nodes if nodes is not None else (_MOCK_NODES if relays == 1 else 0)
    shown = run_demo(
        nodes=mocks,
        relays=relays,
        once=once,
        ready_file=ready_file,
        caller_tools=caller_tools,
        kinds=named,
        called=(_HEALTH,) if kinds is None else named,
    )
    try:
        worked = run_until_stopped(shown)
    except OperatorError as error:
        fail(str(error), EXIT_NO)
    if worked is False:
        raise SystemExit(EXIT_NO)
    if worked is None and once:
        raise SystemExit(EXIT_STOPPED)
