"""``relay token``: agents' bearer tokens.

Must not print anything but the token itself on standard output, except for lists.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from relay.auth.permissions import SCOPES
from relay.cli import options
from relay.cli.exits import fail
from relay.cli.options import (
    AsJson,
    PublicUrl,
    StateDir,
    Tenant,
    answer,
    keep_first,
    listing,
    seconds,
    state_files,
    tenant_name,
    utc,
)
from relay.settings.config import StateFiles
from relay.settings.environment import now_ms
from relay.state.tokens import IssuedToken, IssuedTokens, RevokedTokens, is_jti
from schemas.addresses import mcp_url
from schemas.files import PRIVATE, write_atomic
from schemas.process.cli_manual import example, group
from schemas.process.command_errors import EXIT_CANNOT_RUN, EXIT_NO, EXIT_USAGE
from schemas.text import printable, quoted

if TYPE_CHECKING:
    from nacl.signing import SigningKey

app = group("Agents' bearer tokens.")

_OPTIONS = {
    "/sub": "--sub",
    "/tenant": "--tenant",
    "/exp": "--ttl",
    "/kinds": "--kinds",
    "/nodes": "--nodes",
}
_EXAMPLES = {
    "--sub": ", for example my-agent",
    "--tenant": ", for example acme",
    "--kinds": ", for example 'linux.*'",
    "--nodes": ", for example 'tag:greenhouse'",
}


@app.command("issue", epilog=example("relay token issue --sub my-agent --ttl 12h"))
def token_issue(
    sub: Annotated[str, typer.Option(help="The agent; it is recorded in the audit.")],
    tenant: Tenant = None,
    scope: Annotated[
        list[str] | None,
        typer.Option(
            help="What it allows; repeat. Default: tools:call:read_only.",
            autocompletion=lambda incomplete: [each for each in SCOPES if each.startswith(incomplete)],
        ),
    ] = None,
    kinds: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME,...",
            help="The kinds that it is for, such as 'system.*,linux.*'; ! excludes. A sensitive kind is named"
            " in full. Default: all that are not sensitive.",
        ),
    ] = None,
    nodes: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME,...",
            help="The nodes that it is for: ids, labels and tags, such as 'tag:greenhouse,!site=north';"
            " * stands for any characters, ! excludes. Default: all of the tenant.",
        ),
    ] = None,
    ttl: Annotated[
        str, typer.Option(metavar="DURATION", help="How long it is valid: 90s, 12h, 30d; 365d at most.")
    ] = "30d",
    public_url: PublicUrl = None,
    as_json: AsJson = False,
    state_dir: StateDir = None,
) -> None:
    """Sign a token for an agent, and print it; by its jti it can be revoked."""
    from relay.auth.agent_tokens import TokenOptionError  # noqa: PLC0415 - for this command alone
    from relay.cli.state import token_keys  # noqa: PLC0415 - as above

    scopes = scope or ["tools:call:read_only"]
    if unknown := [name for name in scopes if name not in SCOPES]:
        fail(f"no such scope: {printable(unknown[0])}; there are {', '.join(SCOPES)}", EXIT_USAGE)
    state = _state(state_dir)
    url, key = options.public_url(public_url, state), _key(state)
    if token_keys(state_dir).is_replaced(bytes(key.verify_key)):
        fail(
            "another key has replaced this one: issue tokens where it is, or run `relay token rotate-key`",
            EXIT_CANNOT_RUN,
        )
    try:
        issued, token = signed(
            key,
            url,
            sub=sub,
            tenant=tenant_name(tenant, state),
            scopes=scopes,
            ttl_s=seconds(ttl),
            kinds=_patterns(kinds),
            nodes=[_typed_label(each) for each in _patterns(nodes)],
        )
    except TokenOptionError as error:
        claim = "/" + error.where.split("/")[1]
        option = _OPTIONS.get(claim, error.where)
        fail(str(error).replace(error.where, option, 1) + _EXAMPLES.get(option, ""), EXIT_USAGE)
    IssuedTokens(state.issued_tokens).add(issued)
    keep_first(state, public_url=url if public_url else None, tenant=tenant)
    note = (
        f"jti {issued.jti}: {sub} of tenant {issued.tenant}, for {issued.audience}, "
        f"until {utc(issued.expires_at_ms)} UTC"
    )
    answer({"token": token, **issued.facts()}, as_json=as_json, result=token, note=note)


def _patterns(given: Sequence[str] | None) -> list[str]:
    """Return the patterns of an option that may be repeated, and has several separated by commas."""
    return [each.strip() for part in given or () for each in part.split(",")]


def _typed_label(pattern: str) -> str:
    """Return a pattern of nodes as a token has it, in ASCII: a label with other letters in its kept form."""
    from schemas.labels import kept_form, meant_by  # noqa: PLC0415 - for the command that issues

    excludes = pattern[: pattern.startswith("!")]
    return excludes + kept_form(meant_by(pattern.removeprefix("!")))


def signed(
    key: "SigningKey",
    public_url: str,
    *,
    sub: str,
    tenant: str,
    scopes: Sequence[str],
    ttl_s: int,
    kinds: Sequence[str] = (),
    nodes: Sequence[str] = (),
) -> tuple[IssuedToken, str]:
    """Return a new token for the relay at ``public_url``, and what is recorded of it.

    Raises:
        TokenOptionError: a part of it is malformed.
    """
    from relay.auth.agent_tokens import TokenIssuer  # noqa: PLC0415 - for the commands that sign
    from schemas.registry import SchemaRegistry  # noqa: PLC0415 - as above
    from schemas.ulids import UlidSource  # noqa: PLC0415 - as above

    now, audience = now_ms(), mcp_url(public_url)
    jti = UlidSource(lambda: now, os.urandom).new()
    # Relays of 0.2 read this list too: what they do not know must have a form that they show.
    allowed = (*scopes, *(f"kinds:{each}" for each in kinds), *(f"nodes:{each}" for each in nodes))
    issued = IssuedToken(jti, tenant, sub, allowed, audience, now, now + ttl_s * 1000)
    token = TokenIssuer(key, public_url, audience, SchemaRegistry()).issue(
        sub=sub,
        tenant=tenant,
        scopes=list(scopes),
        now_s=now // 1000,
        ttl_s=ttl_s,
        jti=jti,
        kinds=kinds,
        nodes=nodes,
    )
    return issued, token


@app.command("list", epilog=example("relay token list --json"))
def token_list(as_json: AsJson = False, state_dir: StateDir = None) -> None:
    """Show every token that this relay has issued, without the token itself, and its state."""
    state, now = _state(state_dir), now_ms()
    tokens = IssuedTokens(state.issued_tokens).all().values()
    revoked = RevokedTokens(state.revoked_tokens).jtis()
    listing(
        [{**token.facts(), "state": token.state(revoked, now)} for token in tokens],
        ("JTI", "TENANT", "AGENT", "SCOPES", "EXPIRES (UTC)", "STATE"),
        lambda token: (
            token["jti"],
            token["tenant"],
            token["sub"],
            " ".join(token["scopes"]),
            utc(token["expires_at_ms"]),
            token["state"],
        ),
        as_json=as_json,
    )


@app.command("revoke", epilog=example("relay token revoke 01M7XW30DCJKQTRJE56AZXHJSE"))
def token_revoke(
    jti: Annotated[str, typer.Argument(metavar="JTI", help="The token's id: its claim jti.")],
    foreign: Annotated[
        bool, typer.Option("--foreign", help="The token is of another issuer, or older than the list.")
    ] = False,
    as_json: AsJson = False,
    state_dir: StateDir = None,
) -> None:
    """Revoke a token; a running relay rejects it within a second."""
    if not is_jti(jti):
        fail(f"{quoted(jti)} is not a jti: 1 to 128 printable ASCII characters", EXIT_USAGE)
    state = _state(state_dir)
    if not foreign and jti not in IssuedTokens(state.issued_tokens).all():
        fail(
            f"this relay has issued no token with the jti {quoted(jti)}: see `relay token list`; "
            "for one of another issuer add --foreign",
            EXIT_NO,
        )
    RevokedTokens(state.revoked_tokens).revoke(jti, now_ms=now_ms())
    answer({"revoked": jti}, as_json=as_json, note=f"revoked {jti}")


@app.command("rotate-key", epilog=example("relay token rotate-key --overlap 7d"))
def token_rotate_key(
    overlap: Annotated[
        str, typer.Option(metavar="DURATION", help="How long tokens by older keys are accepted.")
    ] = "30d",
    as_json: AsJson = False,
    state_dir: StateDir = None,
) -> None:
    """Make a new key that signs agents' tokens; every relay of the fleet accepts it within a second."""
    from nacl.signing import SigningKey  # noqa: PLC0415 - for this command alone

    from relay.auth.agent_tokens import MAX_TTL_S  # noqa: PLC0415 - as above
    from relay.cli.state import authority, token_keys  # noqa: PLC0415 - as above
    from relay.state.tokens import key_id  # noqa: PLC0415 - as above
    from schemas.keys import private_key_to_pem  # noqa: PLC0415 - as above

    state, now = _state(state_dir), now_ms()
    overlap_s = seconds(overlap)
    if overlap_s > MAX_TTL_S:
        fail(f"--overlap must be within {MAX_TTL_S // 86_400} days: no token is valid for longer", EXIT_USAGE)
    until_ms = now + overlap_s * 1000
    if not authority(state_dir).can_issue():
        fail("the CA's key is not here: replace the key on the relay that has it", EXIT_CANNOT_RUN)
    keys, new = token_keys(state_dir), SigningKey(os.urandom(32))
    if state.token_key.exists():
        # One that was never run, or is of a version that had no list of keys, must be known to end.
        keys.add(bytes(_key(state).verify_key), now)
    # Before the file: a key that signs and is not known would end all others when the relay starts.
    keys.add(bytes(new.verify_key), until_ms)
    write_atomic(state.token_key, private_key_to_pem(new), PRIVATE)
    kid = key_id(bytes(new.verify_key))
    note = f"tokens by older keys are accepted until {utc(until_ms)} UTC: make a backup now"
    answer({"kid": kid, "old_keys_until_ms": until_ms}, as_json=as_json, result=kid, note=note)


def _state(state_dir: Path | None) -> StateFiles:
    """Return the state of a relay that exists. Only `relay ca init` and `relay run` make its keys."""
    state = state_files(state_dir)
    if not (state.token_key.exists() or state.ca.exists()):
        fail(
            f"{state.root} has no key for tokens: name the relay's state with --state-dir, "
            "or begin with `relay ca init`",
            EXIT_CANNOT_RUN,
        )
    return state


def _key(state: StateFiles) -> "SigningKey":
    """Return the key that signs tokens; end the command if it is elsewhere."""
    from relay.state.key_files import read_key  # noqa: PLC0415 - for the commands that sign

    try:
        return read_key(state.token_key)
    except FileNotFoundError:
        fail(
            "the key of agents' tokens is not here: issue them on the relay with the CA's key",
            EXIT_CANNOT_RUN,
        )
