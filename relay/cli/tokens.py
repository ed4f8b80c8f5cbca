"""``relay token``: agents' bearer tokens.

Must not print anything but the token itself on standard output.
"""

import os
from typing import Annotated

import typer

from relay.auth.agent_tokens import TokenIssuer, TokenOptionError
from relay.auth.permissions import SCOPES
from relay.auth.revoked_tokens import RevokedTokens, is_jti
from relay.cli.exits import EXIT_USAGE, fail
from relay.cli.options import PublicUrl, StateDir, Tenant, seconds, state_files
from relay.clock import now_ms
from relay.config import DEFAULT_PUBLIC_URL
from relay.key_files import load_or_create_key
from schemas.addresses import mcp_url, normal_url
from schemas.registry import SchemaRegistry
from schemas.text import printable
from schemas.ulids import UlidSource

app = typer.Typer(help="Agents' bearer tokens.", no_args_is_help=True)


@app.command("issue")
def token_issue(
    sub: Annotated[str, typer.Option(help="The agent; it is recorded in the audit.")],
    tenant: Tenant = "default",
    scope: Annotated[
        list[str] | None, typer.Option(help="What it allows; repeat. Default: tools:call:read_only.")
    ] = None,
    ttl: Annotated[str, typer.Option(help="How long it is valid: 90s, 15m, 12h or 30d.")] = "12h",
    public_url: PublicUrl = DEFAULT_PUBLIC_URL,
    state_dir: StateDir = None,
) -> None:
    """Sign a token for an agent, and print it; by its jti it can be revoked."""
    scopes = scope or ["tools:call:read_only"]
    if unknown := [name for name in scopes if name not in SCOPES]:
        fail(f"no such scope: {printable(unknown[0])}; there are {', '.join(SCOPES)}", EXIT_USAGE)
    url = normal_url(public_url)
    issuer = TokenIssuer(
        load_or_create_key(state_files(state_dir).token_key, os.urandom), url, mcp_url(url), SchemaRegistry()
    )
    now = now_ms()
    jti = UlidSource(lambda: now, os.urandom).new()
    try:
        token = issuer.issue(
            sub=sub,
            tenant=tenant,
            scopes=scopes,
            now_s=now // 1000,
            ttl_s=seconds(ttl),
            jti=jti,
        )
    except TokenOptionError as error:
        fail(f"--sub, --tenant or --ttl is malformed: {error}", EXIT_USAGE)
    typer.echo(f"jti {jti}", err=True)
    typer.echo(token)


@app.command("revoke")
def token_revoke(
    jti: Annotated[str, typer.Argument(metavar="JTI", help="The token's id: its claim jti.")],
    state_dir: StateDir = None,
) -> None:
    """Revoke a token of any issuer; a running relay rejects it within a second."""
    if not is_jti(jti):
        fail(f"{printable(jti)!r} is not a jti: 1 to 128 printable ASCII characters", EXIT_USAGE)
    RevokedTokens(state_files(state_dir).revoked_tokens).revoke(jti, now_ms())
    typer.echo(f"revoked {jti}", err=True)
