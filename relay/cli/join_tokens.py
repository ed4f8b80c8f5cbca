"""``relay join-token``: the tokens that nodes enrol with.

Must not print a token's key anywhere but in the token itself, on standard output.
"""

import json
import os
from pathlib import Path
from typing import Annotated

import typer

from relay.cli import options
from relay.cli.ca import authority
from relay.cli.exits import EXIT_NO, EXIT_USAGE, fail
from relay.cli.options import (
    AsJson,
    PublicUrl,
    StateDir,
    Tenant,
    keep_first,
    seconds,
    show_table,
    state_files,
    tenant_name,
    utc,
)
from relay.clock import now_ms
from relay.pki.join_tokens import JoinError, JoinTokens
from schemas.addresses import PLAIN_OPTION, is_private_url

app = typer.Typer(help="The tokens that nodes enrol with.", no_args_is_help=True)


@app.command("create")
def join_token_create(
    tenant: Tenant = None,
    ttl: Annotated[str, typer.Option(help="How long it is valid: 90s, 15m, 12h or 30d.")] = "1h",
    uses: Annotated[int, typer.Option(help="For how many nodes.")] = 1,
    public_url: PublicUrl = None,
    state_dir: StateDir = None,
) -> None:
    """Make a join token, and print it: a secret for the node."""
    state = state_files(state_dir)
    url, tenant_used = options.public_url(public_url, state), tenant_name(tenant, state)
    # The oldest root: the relay's certificate is issued by it.
    root = authority(state_dir).roots()[-1]
    try:
        token = _tokens(state_dir).create(tenant_used, seconds(ttl), uses, root)
    except JoinError as error:
        fail(str(error), EXIT_USAGE)
    keep_first(state, public_url=url if public_url else None, tenant=tenant)
    plain = "" if is_private_url(url) else f" {PLAIN_OPTION}"
    typer.echo(
        f"join token {token.id} for tenant {tenant_used}. Put it on the node into a file of mode 0600, "
        "and there type:\n"
        f"  kubelet enroll {url} --token-file FILE{plain}",
        err=True,
    )
    typer.echo(token.text())


@app.command("list")
def join_token_list(as_json: AsJson = False, state_dir: StateDir = None) -> None:
    """Show every join token that was made, without its secret, and its state."""
    now, grants = now_ms(), _tokens(state_dir).all()
    if as_json:
        typer.echo(json.dumps([grant.facts(now) for grant in grants]))
        return
    show_table(
        ("ID", "TENANT", "CREATED (UTC)", "EXPIRES (UTC)", "USED", "STATE"),
        [
            (
                grant.id,
                grant.tenant,
                utc(grant.created_ms),
                utc(grant.expires_at_ms),
                f"{len(grant.node_ids)}/{grant.uses}",
                grant.state(now),
            )
            for grant in grants
        ],
    )


@app.command("revoke")
def join_token_revoke(
    join_id: Annotated[str, typer.Argument(metavar="ID", help="The token's id, the part after ekj1.")],
    state_dir: StateDir = None,
) -> None:
    """Revoke a join token. Nodes that have enrolled with it stay enrolled."""
    try:
        revoked = _tokens(state_dir).revoke(join_id)
    except JoinError as error:
        fail(str(error), EXIT_NO)
    typer.echo(f"revoked {join_id}" if revoked else f"{join_id} was revoked before", err=True)


def _tokens(state_dir: Path | None) -> JoinTokens:
    return JoinTokens(state_files(state_dir).join_tokens, now_ms, os.urandom)
