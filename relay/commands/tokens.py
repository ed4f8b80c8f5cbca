"""``relay token``: agents' bearer tokens."""

import os
from typing import Annotated

import typer

from relay.commands.common import EXIT_USAGE, PublicUrl, StateDir, Tenant, fail, seconds, state_files
from relay.config import DEFAULT_PUBLIC_URL
from schemas.addresses import mcp_url, normal_url
from schemas.registry import ViolationError
from schemas.text import printable

app = typer.Typer(help="Agents' bearer tokens.", no_args_is_help=True)


@app.command("issue")
def token_issue(
    sub: Annotated[str, typer.Option(help="Who will hold it; stands in the audit.")],
    tenant: Tenant = "default",
    scope: Annotated[
        list[str] | None, typer.Option(help="What it allows; repeat. Default: tools:call:read_only.")
    ] = None,
    ttl: Annotated[str, typer.Option(help="How long it is good for: 90s, 15m, 12h or 30d.")] = "12h",
    public_url: PublicUrl = DEFAULT_PUBLIC_URL,
    state_dir: StateDir = None,
) -> None:
    """Sign a token for an agent, and print it."""
    from relay.app import now_ms  # noqa: PLC0415 - the server's parts only when they are needed
    from relay.auth import SCOPES, TokenIssuer, load_or_create_token_key  # noqa: PLC0415
    from schemas.registry import SchemaRegistry  # noqa: PLC0415
    from schemas.ulids import UlidSource  # noqa: PLC0415

    scopes = scope or ["tools:call:read_only"]
    if unknown := [name for name in scopes if name not in SCOPES]:
        fail(f"no such scope: {printable(unknown[0])}; there are {', '.join(SCOPES)}", EXIT_USAGE)
    url = normal_url(public_url)
    issuer = TokenIssuer(
        load_or_create_token_key(state_files(state_dir).token_key), url, mcp_url(url), SchemaRegistry()
    )
    now = now_ms()
    try:
        token = issuer.issue(
            sub=sub,
            tenant=tenant,
            scopes=scopes,
            now_s=now // 1000,
            ttl_s=seconds(ttl),
            jti=UlidSource(lambda: now, os.urandom).new(),
        )
    except ViolationError as error:
        fail(f"--sub, --tenant or --ttl is not of its form: {error}", EXIT_USAGE)
    typer.echo(token)
