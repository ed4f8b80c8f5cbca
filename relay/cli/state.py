"""The state directory, as several commands open it, and ``relay state``, which shows what is kept in it.

``NodeDirectory`` finds the node that an operator means: by id, label or the beginning of an id. ``labels``
completes them in a shell. Must not show a member that is secret, nor a value before it is made printable.
"""

import json
import os
import re
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from relay.cli.exits import fail
from relay.cli.options import AsJson, StateDir, show_table, state_files
from relay.fleet.node_names import NodeNames, UnknownNodeError
from relay.settings.environment import now_ms
from relay.state.certificates import CaRecords
from relay.state.kinds import KINDS, NAME
from relay.state.ledger import Entry, Ledger, LedgerState
from relay.state.merging import OLDEST, SINCE_SEALED, StateKind, is_older
from relay.state.names import NameLedger, Names
from relay.state.tokens import TokenKeys
from schemas.error_roots import EdgeError, OperatorError
from schemas.labels import legible, typed_form
from schemas.process.cli_manual import example, group
from schemas.process.command_errors import EXIT_NO, EXIT_USAGE
from schemas.process.status_socket import NotRunningError, StalledError, read_status
from schemas.text import printable, unknown

if TYPE_CHECKING:
    from relay.pki.authority import CertificateAuthority

_MAX_CLOSE = 3
_WIDTH = 64
_SPECIAL_TO_BASH = re.compile(r"[^\w.,/+@%-]")

app = group("What the operator and the relay have decided, as it is kept.")


class OlderRelayError(OperatorError):
    """A relay of the fleet does not know what a command would write; the text names it."""


def path_to_write(kind: StateKind, state_dir: Path | None) -> Path:
    """Return the file of ``kind``, for a command that writes it.

    All relays of the fleet must know it, as far as the relay of that state directory knows: one that does not
    know an entry refuses every call.

    Raises:
        OlderRelayError: one does not.
    """
    root = state_files(state_dir).root
    path = kind.file.in_directory(root)
    if not is_older(OLDEST, kind.since):
        return path
    try:
        cluster = read_status(root).get("cluster", {})
    except (NotRunningError, StalledError):
        return path  # it keeps its entries back while it is not known whether the others know them
    if cluster.get("sealed") and not is_older(SINCE_SEALED, kind.since):
        return path
    for other in cluster.get("others", []):
        if is_older(version := other.get("version", OLDEST), kind.since):
            relay = f"relay {other['relay']} of this fleet has version {printable(version, 16)}"
            raise OlderRelayError(f"{relay}, and {kind.name} needs {kind.since}: upgrade it first")
    return path


def authority(state_dir: Path | None) -> "CertificateAuthority":
    """Return the CA of that state directory."""
    from relay.pki.authority import CertificateAuthority  # noqa: PLC0415 - some commands do without it

    return CertificateAuthority(state_files(state_dir).ca, now_ms, os.urandom)


def name_ledger(state_dir: Path | None) -> NameLedger:
    """Return the names of the nodes of that state directory."""
    return NameLedger(path_to_write(NAME, state_dir), now_ms)


def token_keys(state_dir: Path | None) -> TokenKeys:
    """Return the keys of agents' tokens of that state directory."""
    return TokenKeys(state_files(state_dir).token_keys, authority(state_dir), now_ms)


class FoundNode(NamedTuple):
    """A node that was ever enrolled, and its tenant."""

    node_id: str
    tenant: str


class NodeDirectory:
    """The nodes of one state directory: those of the CA's ``records``, under the operator's ``names``."""

    def __init__(self, records: CaRecords, names: Names) -> None:
        self.records = records
        self.names = names
        self._tenants = records.tenants()
        self._ids = defaultdict[str, list[str]](list)
        for node_id in sorted(self._tenants):
            self._ids[self._tenants[node_id]].append(node_id)
        self.lookup = NodeNames(self)
        self.lookup.change(names.by_node)

    @classmethod
    def of(cls, state_dir: Path | None) -> "NodeDirectory":
        """Return the nodes of that state directory.

        Raises:
            AuthorityStateError, LedgerError, OSError: a ledger is missing, damaged or cannot be read.
        """
        return cls(authority(state_dir).records(), name_ledger(state_dir).read())

    def ids_of(self, tenant: str) -> Sequence[str]:
        """Return the ids of the nodes of ``tenant``, sorted."""
        return self._ids.get(tenant, ())

    def tenant_of(self, node_id: str) -> str | None:
        """Return the tenant of a node; None if there never was one of that id."""
        return self._tenants.get(node_id)

    def find(self, reference: str, listed_by: str = "relay node list") -> FoundNode:
        """Return the one node that ``reference`` means; end the command if it means none, or several.

        Unlike an agent, the operator is of no tenant: what fits a node of two tenants is refused.
        """
        found: list[FoundNode] = []
        errors: list[UnknownNodeError] = []
        for tenant in sorted(self._ids):
            try:
                found.append(FoundNode(self.lookup.resolve(tenant, reference), tenant))
            except UnknownNodeError as error:
                errors.append(error)
        candidates = len(found) + sum(error.candidates for error in errors)
        if len(found) > 1:
            of = " and ".join(f"{node.node_id} of tenant {node.tenant}" for node in found[:2])
            fail(f"'{legible(reference)}' fits {of}: give the id; see `{listed_by}`", EXIT_NO)
        if candidates != 1:
            close = [name for error in errors for name in error.close][:_MAX_CLOSE]
            fail(f"{UnknownNodeError(reference, lambda: close, candidates)}; see `{listed_by}`", EXIT_NO)
        return found[0]


def labels(ctx: typer.Context, incomplete: str) -> list[str]:
    """Return the labels that begin so, in their letters, or else as they are typed in ASCII.

    A completion is no place for an error: what cannot be read has none.
    """
    try:
        named = name_ledger(ctx.params.get("state_dir")).read().by_node.values()
    except (EdgeError, OSError):
        return []
    forms = ((name.label, typed_form(name.label)) for name in named if name.label)
    found = sorted(next((form for form in each if form.startswith(incomplete)), "") for each in forms)
    # zsh and fish quote what they insert.
    is_bash = os.environ.get("_RELAY_COMPLETE") == "complete_bash"
    return [_SPECIAL_TO_BASH.sub(r"\\\g<0>", each) if is_bash else each for each in found if each]


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


class _Lines(LedgerState):
    """Every line of a file, whatever it means."""

    def __init__(self) -> None:
        self.lines: list[Entry] = []

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
