"""``service install``, ``uninstall`` and ``status`` of both programs.

Must not hold what the commands do: the steps and the machine are modules of their own.
"""

import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer

from schemas.process.cli_manual import example
from schemas.process.service_host import (
    Host,
    Run,
    Service,
    ServiceError,
    Step,
    Take,
    adopt_steps,
    as_document,
    as_lines,
    check_reachable,
    install_steps,
    move_steps,
    scripts_of,
    uninstall_steps,
)

EXIT_NOT_ACTIVE = 1

From = Annotated[
    Path | None,
    typer.Option("--from", metavar="DIRECTORY", help="The state directory to move to the service."),
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Show what would be done, and do nothing.")]
Purge = Annotated[
    bool, typer.Option("--purge", help="Remove state, configuration and user too; nothing restores them.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]


def add_commands(app: typer.Typer, service: Service, next_steps: str) -> None:
    """Add the commands of ``service`` to ``app``.

    ``next_steps`` is printed after its installation.
    """
    program = service.name
    command = f"{program} service"

    @app.command(epilog=example(f"{command} install --dry-run"))
    def install(source: From = None, dry_run: DryRun = False, as_json: AsJson = False) -> None:
        """Put unit, user, directories and configuration in place, for where this program lies.

        With --from, what was tried as another user becomes the service's: its state directory is moved, with
        the packages of kinds in it. What root has tried in the service's own place becomes the service's too.
        """
        steps = _install_steps(service, source)
        if not dry_run:
            need_root(f"{command} install")
            _check_installable(service, steps)
            Host().apply(steps)
        show_steps(steps, dry_run=dry_run, as_json=as_json)
        if not dry_run and not as_json:
            typer.echo(f"{service.unit} is installed, and starts with the system.\n\n{next_steps}", err=True)

    @app.command(epilog=example(f"{command} uninstall --dry-run"))
    def uninstall(dry_run: DryRun = False, purge: Purge = False, as_json: AsJson = False) -> None:
        """Stop the service, and remove what was installed. Its state stays."""
        steps = Host().due(uninstall_steps(service, purge=purge))
        if not dry_run:
            need_root(f"{command} uninstall")
            Host().check_not_packaged(service)
            Host().apply(steps)
        show_steps(steps, dry_run=dry_run, as_json=as_json)

    @app.command(epilog=example(f"{command} status --json"))
    def status(as_json: AsJson = False) -> None:
        """Show what systemd says of the service. Exit 1 if it does not run."""
        found = Host().status(service)
        if as_json:
            typer.echo(json.dumps(found))
        elif not found:
            typer.echo(f"{service.unit} is not installed: {command} install", err=True)
        else:
            _print_aligned(found)
        if found.get("ActiveState") != "active":
            raise SystemExit(EXIT_NOT_ACTIVE)


def _install_steps(service: Service, source: Path | None) -> list[Step]:
    """Return what is due. Of what a package has installed the state alone is missing."""
    host, moved = Host(), None if source is None else source.resolve()
    packages = host.check_movable(service, moved) if moved is not None else ()
    adopts = moved is None and host.has_own_state(service)
    if host.is_packaged(service) and (moved is not None or adopts):
        given = adopt_steps(service) if moved is None else move_steps(service, moved, packages)
        return host.due([*given, Run(("systemd-tmpfiles", "--create", f"{service.name}.conf"))])
    return host.due(install_steps(service, scripts_of(service.name), moved, packages, adopts=adopts))


def _check_installable(service: Service, steps: Sequence[Step]) -> None:
    is_given_its_state = any(isinstance(step, Take) for step in steps)
    if not (Host().is_packaged(service) and is_given_its_state):
        Host().check_not_packaged(service)
        program = service.name
        check_reachable(scripts_of(program) / program, Path(sys.executable))


def _print_aligned(facts: Mapping[str, str]) -> None:
    width = max(map(len, facts))
    for name, value in facts.items():
        typer.echo(f"{name:<{width}}  {value}")


def show_steps(steps: list[Step], *, dry_run: bool, as_json: bool) -> None:
    """Show the steps where they are asked for: of what was done, only programs need a list."""
    if as_json:
        typer.echo(json.dumps({"applied": not dry_run, "steps": as_document(steps)}))
    elif dry_run:
        for line in as_lines(steps):
            typer.echo(line)


def need_root(command: str) -> None:
    """Check that this is root.

    Raises:
        ServiceError: it is not; the text names ``command``.
    """
    if os.geteuid() != 0:
        raise ServiceError(f"it takes root: sudo {command}")
