"""``kind install``, ``uninstall`` and ``list`` of both programs.

Must not hold how a package is installed, which is ``kind_store``.
"""

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer

from schemas.process.cli_service import need_root
from schemas.process.kind_store import Installed, KindStore, read_packages
from schemas.process.state_owner import as_operator
from schemas.settings import Program, Setting, read_sources

WheelFile = Annotated[Path, typer.Argument(metavar="WHEEL", help="The package of the kind, as a wheel.")]
KindName = Annotated[str, typer.Argument(metavar="NAME", help="A kind of the package.")]


@dataclass(frozen=True, slots=True)
class KindCommands:
    """What the commands of one program do.

    Attributes:
        setting: names the kinds that the program has.
        of_service: the directory of packages of its service, which is root's.
        run_here: whether the program runs their handlers.
    """

    program: Program
    setting: Setting[tuple[str, ...]]
    of_service: Path
    run_here: bool

    def install(
        self, place: Path, wheel: Path, requirements: Path | None = None, *, dry_run: bool, as_json: bool
    ) -> None:
        """Put the package ``wheel`` into ``place``, with what ``requirements`` pins."""
        with self._store(place, None if dry_run else "install") as store:
            with as_operator():
                packages = read_packages(wheel, requirements, run_here=self.run_here)
            package = store.install(packages, dry_run=dry_run)
        _show([package], as_json=as_json)
        if not dry_run:
            named, file = json.dumps(package.kinds), self.program.usual_file.name
            typer.echo(f"next: name it in {file}, kinds = {named}, and restart the {self._process}", err=True)

    def uninstall(self, place: Path, name: str, *, dry_run: bool, as_json: bool) -> None:
        """Remove the package in ``place`` that brings the kind ``name``."""
        with self._store(place, None if dry_run else "uninstall") as store:
            package = store.uninstall(name, dry_run=dry_run)
        _show([package], as_json=as_json)
        named = read_sources(self.program, {}, None, os.environ).value(self.setting) or ()
        if still := [kind for kind in package.kinds if kind in named]:
            out = f"take {', '.join(still)} out of the setting kinds"
            typer.echo(f"next: {out}: the {self._process} does not start with it", err=True)

    def show(self, place: Path, *, as_json: bool) -> None:
        with self._store(place, None) as store:
            packages = store.packages()
        _show(packages, as_json=as_json)
        if not packages:
            typer.echo(f"no package was installed by `{self.program.name} kind install`", err=True)

    @property
    def _process(self) -> str:
        return "daemon" if self.run_here else self.program.name

    @contextmanager
    def _store(self, place: Path, changes: str | None) -> Iterator[KindStore]:
        """Give the packages in ``place`` to the command that ``changes`` them."""
        if place != self.of_service:
            yield KindStore(place, self.program.name, run_here=self.run_here)
            return
        # Root's, and not those of the state directory's owner: the service must not be able to change them.
        with as_operator():
            if changes is not None:
                need_root(f"{self.program.name} kind {changes}")
            yield KindStore(place, self.program.name, run_here=self.run_here)


def _show(packages: Sequence[Installed], *, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps([asdict(package) for package in packages]))
        return
    width = max((len(f"{each.name} {each.version}") for each in packages), default=0)
    for each in packages:
        typer.echo(f"{f'{each.name} {each.version}':<{width}}  {', '.join(each.kinds)}")
