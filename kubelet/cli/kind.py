"""``kubelet kind``: kinds of an operator's own. Must not hold what it calls."""

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from kubelet.cli.new_kind import KindSource, write_package
from kubelet.cli.options import AsJson
from kubelet.cli.output import print_facts
from schemas.process.cli_manual import example, group

app = group("Kinds of your own, in packages.")


@app.callback()
def options() -> None:
    """Kinds of your own, in packages."""


@app.command(epilog=example("kubelet kind new acme.oven --from sensor"))
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
