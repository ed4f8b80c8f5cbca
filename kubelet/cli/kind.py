"""``kubelet kind``: kinds of an operator's own. Must not hold what it calls."""

from pathlib import Path
from typing import Annotated

import typer

from kubelet.cli.new_kind import write_package
from kubelet.cli.options import AsJson
from kubelet.cli.output import print_facts
from schemas.process.cli_manual import example, group

app = group("Kinds of your own, in packages.")


@app.callback()
def options() -> None:
    """Kinds of your own, in packages."""


@app.command(epilog=example("edge-kubelet kind new acme.uptime"))
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
