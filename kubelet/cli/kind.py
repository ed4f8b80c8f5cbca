"""``kubelet kind``: kinds of an operator's own. Must not hold what it calls."""

import grp
from pathlib import Path
from typing import Annotated

import typer

from kubelet.cli.devices import DEVICE_CLASSES, device_steps, group_of
from kubelet.cli.new_kind import write_package
from kubelet.cli.options import AsJson
from kubelet.cli.output import print_facts
from kubelet.cli.service import SERVICE
from schemas.process.cli_manual import example, group
from schemas.process.cli_service import DryRun, need_root, show_steps
from schemas.process.service_host import Host, ServiceError

app = group("Kinds of your own, in packages.")


@app.callback()
def options() -> None:
    """Kinds of your own, in packages."""


@app.command(epilog=example("kubelet kind new acme.uptime"))
def new(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The kind, such as acme.uptime.")],
    directory: Annotated[
        Path, typer.Option(metavar="DIRECTORY", help="Where to make the package's directory.")
    ] = Path(),
    as_json: AsJson = False,
) -> None:
    """Write the package of a new kind: row, documents, handler and test, which pass as they are."""
    root = write_package(name, directory)
    if as_json:
        print_facts({"kind": name, "directory": str(root)}, as_json=True)
    else:
        typer.echo(f"{name} is in {root}")


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
