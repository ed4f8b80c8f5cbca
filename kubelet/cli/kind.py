"""``kubelet kind``: kinds of an operator's own. Must not hold what it calls."""

import grp
import json
import os
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from kubelet.cli.devices import DEVICE_CLASSES, device_steps, group_of
from kubelet.cli.kind_store import Installed, KindStore, read_packages
from kubelet.cli.new_kind import KindSource, write_package
from kubelet.cli.options import AsJson, StateDir, directory_of
from kubelet.cli.output import print_facts, say
from kubelet.cli.service import SERVICE
from kubelet.config import SERVICE_KINDS, kinds_directory
from kubelet.settings import KINDS, KUBELET
from schemas.process.cli_manual import example, group
from schemas.process.cli_service import DryRun, need_root, show_steps
from schemas.process.service_host import Host, ServiceError
from schemas.process.state_owner import as_operator
from schemas.settings_sources import read_sources

app = group("Kinds of your own, in packages.")


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
    wheel: Annotated[Path, typer.Argument(metavar="WHEEL", help="The package of the kind, as a wheel.")],
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
    with _store(state_dir, None if dry_run else "install") as store:
        with as_operator():
            packages = read_packages(wheel, requirements)
        package = store.install(packages, dry_run=dry_run)
    _show([package], as_json=as_json)
    if not dry_run:
        say(f"next: name it in kubelet.toml, kinds = {json.dumps(package.kinds)}, and restart the daemon")


@app.command(epilog=example("kubelet kind uninstall acme.uptime"))
def uninstall(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A kind of the package.")],
    state_dir: StateDir = None,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Remove the package that brings a kind, and what was installed with it."""
    with _store(state_dir, None if dry_run else "uninstall") as store:
        package = store.uninstall(name, dry_run=dry_run)
    _show([package], as_json=as_json)
    named = read_sources(KUBELET, {}, None, os.environ).value(KINDS) or ()
    if still := [kind for kind in package.kinds if kind in named]:
        say(f"next: take {', '.join(still)} out of the setting kinds: the daemon does not start with it")


@app.command("list", epilog=example("kubelet kind list"))
def list_installed(state_dir: StateDir = None, as_json: AsJson = False) -> None:
    """List the packages that `kubelet kind install` has installed, and their kinds."""
    with _store(state_dir, None) as store:
        packages = store.packages()
    _show(packages, as_json=as_json)
    if not packages:
        say("no package was installed by `kubelet kind install`")


@contextmanager
def _store(state_dir: Path | None, changes: str | None) -> Iterator[KindStore]:
    """Give the packages that the daemon of a state directory has, to the command that ``changes`` them."""
    place = kinds_directory(directory_of(state_dir))
    if place != SERVICE_KINDS:
        yield KindStore(place)
        return
    # Root's, and not those of the directory's owner: the service must not be able to change them.
    with as_operator():
        if changes is not None:
            need_root(f"kubelet kind {changes}")
        yield KindStore(place)


def _show(packages: Sequence[Installed], *, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps([asdict(package) for package in packages]))
        return
    width = max((len(f"{each.name} {each.version}") for each in packages), default=0)
    for each in packages:
        typer.echo(f"{f'{each.name} {each.version}':<{width}}  {', '.join(each.kinds)}")
