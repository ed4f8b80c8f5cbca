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

from relay.ca import AuthorityError
from relay.commands import ca, tokens
from relay.commands.common import (
    EXIT_CANNOT_RUN,
    EXIT_NO,
    EXIT_USAGE,
    PublicUrl,
    StateDir,
    fail,
    state_files,
)
from relay.config import DEFAULT_LISTEN, DEFAULT_PUBLIC_URL, RelayConfig
from schemas.addresses import AddressError, is_loopback, normal_url, parse_broker, parse_host_port

app = typer.Typer(
    name="relay",
    help="The hub: shows what trusted nodes can do as MCP tools, and routes calls to them.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
app.add_typer(ca.app, name="ca")
app.add_typer(tokens.app, name="token")


def main() -> None:
    """Run the command line, and say an error in one line."""
    try:
        app()
    except AddressError as error:
        fail(str(error), EXIT_USAGE)
    except OSError as error:
        fail(f"{error.filename}: {error.strerror}" if error.filename else str(error), EXIT_CANNOT_RUN)
    except AuthorityError as error:
        fail(str(error), EXIT_CANNOT_RUN)


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
        fail(
            f"{address} is open to others and this port speaks plain HTTP: put a TLS proxy in front",
            EXIT_USAGE,
        )
    config = RelayConfig(parse_broker(broker), normal_url(public_url), address, state_files(state_dir))
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
        fail(str(error), EXIT_NO)
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
