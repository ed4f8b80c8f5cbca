"""``relay state``: shows what is kept of one kind of state, as the file has it.

Must not show a member that is secret, nor a value before it is made printable.
"""

import json
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from relay.cli.exits import fail
from relay.cli.options import AsJson, StateDir, show_table, state_files
from relay.state.kinds import KINDS
from relay.state.ledger import Entry, Ledger
from schemas.process.cli_manual import example, group
from schemas.process.command_errors import EXIT_USAGE
from schemas.text import printable
from schemas.unknown_names import unknown

_WIDTH = 64

app = group("What the operator and the relay have decided, as it is kept.")


@app.callback()
def options() -> None:
    """What the operator and the relay have decided, as it is kept."""


@app.command("show", epilog=example("relay state show revocation", "relay state show name --json"))
def state_show(
    kind: Annotated[str, typer.Argument(metavar="KIND", help=f"One of {', '.join(k.name for k in KINDS)}.")],
    as_json: AsJson = False,
    state_dir: StateDir = None,
) -> None:
    """Show the entries of one kind, oldest first, without what is secret in them."""
    found = [row for row in KINDS if row.name == kind]
    if not found:
        fail(unknown("kind of state", kind, (row.name for row in KINDS)), EXIT_USAGE)
    (row,) = found
    file = row.file
    ledger = Ledger(file.in_directory(state_files(state_dir).root), _Lines(), secret=bool(file.secret))
    entries = [*row.entries_in(ledger.read().lines)]
    if as_json:
        typer.echo(json.dumps({"kind": kind, "rule": row.rule, "entries": entries}))
        return
    names = list(dict.fromkeys(name for entry in entries for name in entry if name != "action"))
    show_table(names, [[_shown(entry.get(name)) for name in names] for entry in entries])


class _Lines:
    """Every line of a file, whatever it means."""

    def __init__(self, lines: Sequence[Entry] = ()) -> None:
        self.lines = list(lines)

    def copy(self) -> "_Lines":
        return _Lines(self.lines)

    def apply(self, entry: Entry) -> None:
        self.lines.append(entry)


def _shown(value: Any) -> str:
    match value:
        case None:
            return "-"
        case list():
            return ", ".join(map(_shown, value)) or "-"
        case _:
            return printable(str(value), _WIDTH)
