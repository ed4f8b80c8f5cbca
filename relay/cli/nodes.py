"""``relay node``: how the operator names nodes, and which there are; ``relay fleet``: what a relay lists.

Works on the state directory, whether or not a relay runs: a running one applies a change within a second.
With ``--live``, and for ``relay fleet``, the running relay is asked. Must not decide what a label may be.
"""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from relay.cli.exits import fail
from relay.cli.options import (
    AsJson,
    FleetOptions,
    StateDir,
    Tenant,
    answer,
    listing,
    show_table,
    takes_options,
    utc,
)
from relay.cli.state import FoundNode, NodeDirectory, labels, name_ledger
from relay.settings.environment import now_ms
from relay.state.certificates import KID_DIGITS
from relay.state.names import LabelTakenError
from schemas.labels import NameRuleError, typed_form, with_typed_form
from schemas.process.cli_manual import example, group
from schemas.process.command_errors import EXIT_NO, EXIT_USAGE

app = group("Labels and tags of nodes, and which nodes there are.")
fleet_app = group("What a running relay lists: nodes and tools.")

NodeReference = Annotated[
    str,
    typer.Argument(
        metavar="NODE",
        help="A node: its id, its label, or 6 or more characters of the id.",
        autocompletion=labels,
    ),
]


@app.command("label", epilog=example('relay node label 01m7xw "greenhouse pi"'))
def node_label(
    node: NodeReference,
    label: Annotated[str | None, typer.Argument(metavar="LABEL", help="The new label.")] = None,
    remove: Annotated[bool, typer.Option("--remove", help="Take its label away.")] = False,
    as_json: AsJson = False,
    state_dir: StateDir = None,
) -> None:
    """Give a node a label, which is unique in its tenant; a running relay applies it within a second."""
    if (label is None) is not remove:
        fail("give a label, or --remove", EXIT_USAGE)
    found = _known(NodeDirectory.of(state_dir), node)
    try:
        given = name_ledger(state_dir).label(found.node_id, found.tenant, label or "")
    except NameRuleError as error:
        fail(str(error), EXIT_USAGE)
    except LabelTakenError as error:
        fail(str(error), EXIT_NO)
    facts = {"node_id": found.node_id, "tenant": found.tenant} | _label_facts(given)
    note = f"{found.node_id} of tenant {found.tenant}: {with_typed_form(given) or 'no label'}"
    answer(facts, as_json=as_json, note=note)


@app.command("tag", epilog=example('relay node tag "greenhouse pi" site=north gateway --remove old'))
def node_tag(
    node: NodeReference,
    tags: Annotated[
        list[str] | None, typer.Argument(metavar="TAG", help="Tags: gateway, or site=north.")
    ] = None,
    remove: Annotated[
        list[str] | None, typer.Option(metavar="KEY", help="Remove the tag of this key; repeat.")
    ] = None,
    as_json: AsJson = False,
    state_dir: StateDir = None,
) -> None:
    """Set or remove tags of a node. A node has one value for each key: site=south replaces site=north."""
    if not tags and not remove:
        fail("give tags, or --remove KEY", EXIT_USAGE)
    found = _known(NodeDirectory.of(state_dir), node)
    try:
        name_ledger(state_dir).tag(found.node_id, found.tenant, tags or (), remove or ())
    except NameRuleError as error:
        fail(str(error), EXIT_USAGE)
    now_has = NodeDirectory.of(state_dir).lookup.tags_of(found.node_id)
    facts = {"node_id": found.node_id, "tenant": found.tenant, "tags": list(now_has)}
    note = f"{found.node_id} of tenant {found.tenant}: {' '.join(now_has) or 'no tags'}"
    answer(facts, as_json=as_json, note=note)


@app.command("list", epilog=example("relay node list --tenant acme", "relay node list --live --watch"))
@takes_options
def node_list(
    tenant: Annotated[
        str | None, typer.Option(help="Of this tenant alone. With --live: as for `relay fleet`.")
    ] = None,
    live: Annotated[
        bool, typer.Option("--live", help="Ask the running relay, reached by the next five options.")
    ] = False,
    *,
    given: FleetOptions,
    as_json: AsJson = False,
    state_dir: StateDir = None,
) -> None:
    """Show every node that was enrolled and is not forgotten; with --live which of them are connected.

    With --live the relay is asked, as an agent of one tenant asks it: which of its nodes are connected, and
    until when their manifests are valid.
    """
    if live:
        _show_live(given, tenant, state_dir, as_json=as_json)
        return
    if given != FleetOptions():
        fail("--url, --token-file, --root, --watch and --public-url need --live", EXIT_USAGE)
    directory = NodeDirectory.of(state_dir)
    nodes = [
        _facts(directory, FoundNode(node_id, its))
        for node_id, its in sorted(directory.records.tenants().items())
        if tenant in {None, its} and not _is_forgotten(directory, node_id)
    ]
    listing(
        nodes,
        ("NODE", "TENANT", "LABEL", "TAGS", "CERTIFICATE", "EXPIRES (UTC)"),
        lambda node: (
            node["node_id"],
            node["tenant"],
            with_typed_form(node["label"] or "-"),
            " ".join(node["tags"]) or "-",
            node["certificates"][-1]["state"],
            utc(node["certificates"][-1]["not_after_ms"]),
        ),
        as_json=as_json,
    )


@app.command("show", epilog=example('relay node show "greenhouse pi" --json'))
def node_show(node: NodeReference, as_json: AsJson = False, state_dir: StateDir = None) -> None:
    """Show one node: its names, and its certificates."""
    directory = NodeDirectory.of(state_dir)
    facts = _facts(directory, directory.find(node))
    if as_json:
        typer.echo(json.dumps(facts))
        return
    typer.echo(f"node    {facts['node_id']}\ntenant  {facts['tenant']}")
    typer.echo(
        f"label   {with_typed_form(facts['label'] or '-')}\ntags    {' '.join(facts['tags']) or '-'}\n"
    )
    show_table(
        ("KID", "ISSUED (UTC)", "EXPIRES (UTC)", "STATE", "JOIN TOKEN"),
        [
            (
                each["kid"][:KID_DIGITS],
                utc(each["issued_ms"]),
                utc(each["not_after_ms"]),
                each["state"],
                each["join_id"] or "-",
            )
            for each in facts["certificates"]
        ],
    )


@app.command("forget", epilog=example("relay node forget 01m7xw30dcjkqtrje56azxhjse"))
def node_forget(node: NodeReference, as_json: AsJson = False, state_dir: StateDir = None) -> None:
    """Remove a retired or revoked node from the lists, with its label and tags. Its id stays taken."""
    directory = NodeDirectory.of(state_dir)
    found = directory.find(node)
    if directory.records.unrevoked(found.node_id):
        fail(
            f"{found.node_id} has a certificate that is not revoked: "
            f"run `edge-kubelet retire` on it, or `relay ca revoke {found.node_id}`",
            EXIT_NO,
        )
    name_ledger(state_dir).forget(found.node_id)
    answer({"forgotten": found.node_id}, as_json=as_json, note=f"forgotten {found.node_id}")


@fleet_app.command("nodes", epilog=example("relay fleet nodes --watch"))
@takes_options
def fleet_nodes(
    given: FleetOptions, tenant: Tenant = None, as_json: AsJson = False, state_dir: StateDir = None
) -> None:
    """Show the nodes of a tenant: the same as `relay node list --live`."""
    _show_live(given, tenant, state_dir, as_json=as_json)


def _show_live(given: FleetOptions, tenant: str | None, state_dir: Path | None, *, as_json: bool) -> None:
    from relay.cli.fleet import NODES, show  # noqa: PLC0415 - the HTTP client, for what asks a relay

    show(NODES, given, tenant, state_dir, as_json=as_json)


@fleet_app.command("tools", epilog=example("relay fleet tools --tenant acme --json"))
@takes_options
def fleet_tools(
    given: FleetOptions, tenant: Tenant = None, as_json: AsJson = False, state_dir: StateDir = None
) -> None:
    """Show the tools that an agent of a tenant reads in the relay's list."""
    from relay.cli.fleet import TOOLS, show  # noqa: PLC0415 - as above

    show(TOOLS, given, tenant, state_dir, as_json=as_json)


def _known(directory: NodeDirectory, reference: str) -> FoundNode:
    """Return the node that is to be named: one that was forgotten would keep its names out of sight."""
    found = directory.find(reference)
    if _is_forgotten(directory, found.node_id):
        fail(f"{found.node_id} was forgotten: `relay ca issue --replace` makes it a node again", EXIT_NO)
    return found


def _is_forgotten(directory: NodeDirectory, node_id: str) -> bool:
    # The operator can issue to it again: then it is a node like any other.
    return node_id in directory.names.forgotten and not directory.records.unrevoked(node_id)


def _label_facts(label: str) -> dict[str, str | None]:
    """Return a label for programs: as it is shown, and what is typed for it in ASCII."""
    return {"label": label or None, "label_ascii": typed_form(label) or None}


def _facts(directory: NodeDirectory, node: FoundNode) -> dict[str, Any]:
    """Return a node for programs."""
    records, now = directory.records, now_ms()
    return {
        "node_id": node.node_id,
        "tenant": node.tenant,
        **_label_facts(directory.lookup.label_of(node.node_id)),
        "tags": list(directory.lookup.tags_of(node.node_id)),
        "certificates": [
            {
                "kid": leaf.kid,
                "issued_ms": leaf.issued_ms,
                "not_after_ms": leaf.not_after_ms,
                "state": records.state(leaf, now),
                "join_id": leaf.join_id,
            }
            for leaf in records.leaves_of(node.node_id)
        ],
    }
