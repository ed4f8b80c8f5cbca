"""``kubelet kind``: kinds of an operator's own. Must not hold what it calls."""

import grp
import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from kubelet.cli.devices import DEVICE_CLASSES, device_steps, group_of
from kubelet.cli.new_kind import KindSource, write_package
from kubelet.cli.options import AsJson, StateDir, directory_of
from kubelet.cli.output import print_facts
from kubelet.cli.service import SERVICE
from kubelet.config import SERVICE_KINDS, kinds_directory
from kubelet.settings import KINDS, KUBELET
from schemas.process.cli_kinds import KindCommands, KindName, WheelFile
from schemas.process.cli_manual import example, group
from schemas.process.cli_service import DryRun, need_root, show_steps
from schemas.process.service_host import Host, ServiceError

app = group("Kinds of your own, in packages.")
_COMMANDS = KindCommands(KUBELET, KINDS, SERVICE_KINDS, run_here=True)


@app.callback()
def options() -> None:
    """Kinds of your own, in packages."""


@app.command(epilog=example("edge-kubelet kind new acme.oven --from sensor"))
def new(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The kind, such as acme.oven.")],
    directory: Annotated[
        Path, typer.Option(metavar="DIRECTORY", help="Where to make the package's directory.")
    ] = Path(),
    source: Annotated[
        KindSource, typer.Option("--from", help="What it reads: a sensor, the journal, or a command.")
    ] = KindSource.SENSOR,
    as_json: AsJson = False,
) -> None:
    """Write the package of a new kind: row, documents, handler and test, which pass as they are."""
    root = write_package(name, directory, source)
    # This interpreter has what the package needs, also where it is a service's own.
    test = shlex.join([sys.executable, "-P", "-m", "unittest", "discover", str(root)])
    if as_json:
        print_facts({"kind": name, "directory": str(root), "test": test}, as_json=True)
    else:
        typer.echo(f"{name} is in {root}\nIts test: {test}")


@app.command("allow-device", epilog=example("kubelet kind allow-device i2c --dry-run"))
def allow_device(
    name: Annotated[
        str, typer.Argument(metavar="CLASS", help=f"A class of devices: {', '.join(DEVICE_CLASSES)}.")
    ],
    remove: Annotated[bool, typer.Option("--remove", help="The service may not open it any more.")] = False,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Let the service open devices of one class, by a drop-in of its unit; it sees none otherwise."""
    owner = group_of(name)
    try:
        grp.getgrnam(owner)
    except KeyError:
        # The unit would not start again.
        raise ServiceError(f"this system has no group {owner}, to which devices of {name} belong") from None
    steps = Host().due(device_steps(SERVICE.unit, name, remove=remove))
    if not dry_run:
        need_root(f"kubelet kind allow-device {name}")
        Host().apply(steps)
    show_steps(steps, dry_run=dry_run, as_json=as_json)


@app.command(epilog=example("kubelet kind install acme_uptime-1.0.0-py3-none-any.whl"))
def install(
    wheel: WheelFile,
    requirements: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="What it needs: lines NAME==VERSION --hash=sha256:HEX"),
    ] = None,
    state_dir: StateDir = None,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Put the package of a kind where the daemon finds it, with what it needs, and nothing of the daemon's.

    Wheels of what it needs lie beside FILE, or pip downloads them, where this program's environment has it.
    """
    place = kinds_directory(directory_of(state_dir))
    _COMMANDS.install(place, wheel, requirements, dry_run=dry_run, as_json=as_json)


@app.command(epilog=example("kubelet kind uninstall acme.uptime"))
def uninstall(
    name: KindName,
    state_dir: StateDir = None,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Remove the package that brings a kind, and what was installed with it."""
    _COMMANDS.uninstall(kinds_directory(directory_of(state_dir)), name, dry_run=dry_run, as_json=as_json)


@app.command("list", epilog=example("kubelet kind list"))
def list_installed(state_dir: StateDir = None, as_json: AsJson = False) -> None:
    """List the packages that `kubelet kind install` has installed, and their kinds."""
    _COMMANDS.show(kinds_directory(directory_of(state_dir)), as_json=as_json)
