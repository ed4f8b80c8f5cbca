"""``relay join-token``: the tokens that nodes enrol with.

Must not print a token's key anywhere but in the token itself, on standard output.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from relay.cli import options
from relay.cli.exits import fail
from relay.cli.options import (
    AsJson,
    PublicUrl,
    StateDir,
    Tenant,
    answer,
    is_terminal,
    keep_first,
    listing,
    seconds,
    state_files,
    tenant_name,
    utc,
)
from relay.cli.state import NodeDirectory, authority, name_ledger
from relay.settings.broker import broker_of_nodes
from relay.settings.environment import now_ms
from relay.settings.kept import read_kept
from relay.state.join_tokens import JoinError, JoinTokens
from relay.state.names import LabelTakenError
from schemas.addresses import PLAIN_OPTION, is_private_url
from schemas.enrolment import JOIN_TOKEN_VARIABLE
from schemas.labels import NameRuleError, check_tags, label_of
from schemas.process.cli_manual import example, group
from schemas.process.command_errors import EXIT_CANNOT_RUN, EXIT_NO, EXIT_USAGE

app = group("The tokens that nodes enrol with.")


@app.command("create", epilog=example('relay join-token create --label "greenhouse pi" --tag site=north'))
def join_token_create(
    tenant: Tenant = None,
    ttl: Annotated[str, typer.Option(metavar="DURATION", help="How long it is valid: 90s, 12h, 30d.")] = "1h",
    uses: Annotated[int, typer.Option(help="For how many nodes.")] = 1,
    label: Annotated[str, typer.Option(help="The label of the node; only with one use.")] = "",
    tag: Annotated[
        list[str] | None, typer.Option(help="A tag of each node: gateway, or site=north; repeat.")
    ] = None,
    replaces: Annotated[
        str | None,
        typer.Option("--for", metavar="NODE", help="The node that keeps its id, with a new key: a lost one."),
    ] = None,
    public_url: PublicUrl = None,
    as_json: AsJson = False,
    state_dir: StateDir = None,
) -> None:
    """Make a join token, and print it: a secret for the node.

    On a terminal it prints the line to paste on the node.
    """
    state = state_files(state_dir)
    url, tenant_used = options.public_url(public_url, state), tenant_name(tenant, state)
    kept = None if replaces is None else NodeDirectory.of(state_dir).find(replaces)
    if kept is not None:
        if label or tag or tenant not in {None, kept.tenant}:
            fail("--for keeps the node's label, tags and tenant: leave them out", EXIT_USAGE)
        tenant_used = kept.tenant
    label = _checked_names(tenant_used, label, tag or (), state_dir)
    ca = authority(state_dir)
    # The oldest root: the relay's certificate is issued by it.
    root = ca.roots()[-1]
    if not ca.can_issue():
        # A node that has it could never enrol: the relay with the key does not know it.
        fail("the CA's key is not here: make join tokens on the relay that has it", EXIT_CANNOT_RUN)
    try:
        node_id = "" if kept is None else kept.node_id
        token = _tokens(state_dir).create(tenant_used, seconds(ttl), uses, root, label, tag or (), node_id)
    except JoinError as error:
        fail(str(error), EXIT_USAGE)
    keep_first(state, public_url=url if public_url else None, tenant=tenant)
    again = "" if kept is None else " --again"
    command = f"edge-kubelet enroll {url}{again}" + ("" if is_private_url(url) else f" {PLAIN_OPTION}")
    # In a variable, because every user of a machine can read the arguments of a process.
    line = f"{JOIN_TOKEN_VARIABLE}={token.text()} {command}"
    note = f"join token {token.id} for tenant {tenant_used}.\n"
    if (broker := broker_of_nodes(read_kept(state.settings), url)) is not None:
        note += f"The node is told the broker {broker}, and must be able to reach it.\n"
    if is_terminal():
        note, result = f"{note}Paste this line on the node:", line
    else:
        note += f"Put it on the node into a file of mode 0600, and there type:\n  {command} --token-file FILE"
        result = token.text()
    facts = {"token": token.text(), "id": token.id, "tenant": tenant_used, "url": url, "uses": uses}
    answer({**facts, "line": line}, as_json=as_json, result=result, note=note)


@app.command("list", epilog=example("relay join-token list"))
def join_token_list(as_json: AsJson = False, state_dir: StateDir = None) -> None:
    """Show every join token that was made, without its secret, and its state."""
    now = now_ms()
    listing(
        [grant.facts(now) for grant in _tokens(state_dir).all()],
        ("ID", "TENANT", "LABEL", "TAGS", "CREATED (UTC)", "EXPIRES (UTC)", "USED", "STATE"),
        lambda grant: (
            grant["id"],
            grant["tenant"],
            grant["label"] or "-",
            " ".join(grant["tags"]) or "-",
            utc(grant["created_ms"]),
            utc(grant["expires_at_ms"]),
            f"{grant['used']}/{grant['uses']}",
            grant["state"],
        ),
        as_json=as_json,
    )


@app.command("revoke", epilog=example("relay join-token revoke 01K3ZV5W9QX8M4T2R6N7P0SDFG"))
def join_token_revoke(
    join_id: Annotated[str, typer.Argument(metavar="ID", help="The token's id, the part after ekj1.")],
    as_json: AsJson = False,
    state_dir: StateDir = None,
) -> None:
    """Revoke a join token. Nodes that have enrolled with it stay enrolled.

    In a cluster it can be revoked on any machine, also on one that does not list it.
    """
    ca = authority(state_dir)
    made_here = ca.can_issue() or not ca.root_file.exists()
    try:
        revoked = _tokens(state_dir).revoke(join_id, made_here=made_here)
    except JoinError as error:
        fail(str(error), EXIT_NO)
    note = f"revoked {join_id}" if revoked else f"{join_id} was revoked before"
    if revoked and not made_here:
        note += "; the relay with the CA's key refuses it as soon as both are connected to NATS"
    answer({"id": join_id, "revoked_now": revoked}, as_json=as_json, note=note)


def _checked_names(tenant: str, label: str, tags: Sequence[str], state_dir: Path | None) -> str:
    """Return the label as it is shown; end the command if a node could not be given these names now."""
    try:
        label = label and label_of(label)
        check_tags(tags)
    except NameRuleError as error:
        fail(str(error), EXIT_USAGE)
    if label and (holder := name_ledger(state_dir).read().taken_by(tenant, label)) is not None:
        fail(str(LabelTakenError(label, holder)), EXIT_NO)
    return label


def _tokens(state_dir: Path | None) -> JoinTokens:
    return JoinTokens(state_files(state_dir).join_tokens, now_ms, os.urandom)
