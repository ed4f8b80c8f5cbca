"""``relay tools``, ``call`` and ``login``: the tools of any MCP server, for a person or a script.

A person who names a tool has decided to call it: ``relay call`` allows that one name, at any risk unless
``--max-risk`` states a ceiling. Pins, schemas and the audit apply as in a program.
``relay login`` keeps which server they use. Must not contain what the guarded client does, nor print a token.
"""

import asyncio
import json
import os
import shutil
import sys
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from relay.cli import remote_server as remote
from relay.cli.exits import fail
from relay.cli.options import AsJson, answer, milliseconds, show_table, takes_options
from relay.client.credentials import Profile, check_token_file
from schemas.process.cli_manual import example, group
from schemas.process.command_errors import EXIT_NO, EXIT_USAGE
from schemas.process.state_owner import act_as_owner_of
from schemas.text import nearest, printable

if TYPE_CHECKING:
    from relay.remote_tools import Surveyed, ToolContract, ToolResult


_NARROW = 24
_MAX_ARGUMENTS = 1 << 20
_PROGRESS_AFTER_S = 1.0
_CLEAR = "\r\x1b[K"


class RiskCeiling(StrEnum):
    """The risk up to which a call is made."""

    READ = "read"
    WRITE = "write"
    ADMIN = "admin"


tools_app = group("The tools of any MCP server.")
call_app = group("Call a tool of any MCP server.")


@tools_app.command(epilog=example("relay tools --url https://mcp.example/mcp --token-file token"))
@takes_options
def tools(
    remote_options: remote.RemoteOptions,
    accept: Annotated[
        str | None, typer.Option(metavar="NAME", help="Pin this tool as it is now, after a review.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List the tools of an MCP server: their safety class, and what they would be refused for."""
    surveyed = remote.run_command(remote.survey(remote_options, accept), as_json=as_json)
    if as_json:
        typer.echo(json.dumps([_document(tool) for tool in surveyed], indent=2))
        return
    _show(surveyed)
    if accept is not None:
        typer.echo(f"{printable(accept)} is pinned as it is now.", err=True)


@call_app.command(
    epilog=example("""relay call sysecho-invoke '{"node": "pi", "message": "ping"}' --token-file t""")
)
@takes_options
def call(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The tool, as `relay tools` lists it.")],
    arguments: Annotated[
        str | None, typer.Argument(metavar="JSON", help="The arguments, an object. Default: none.")
    ] = None,
    from_stdin: Annotated[
        bool, typer.Option("--stdin", help="Read the arguments from standard input instead.")
    ] = False,
    field: Annotated[
        str | None,
        typer.Option("--output", "-o", metavar="FIELD", help="Print this member of the result: a.b.0.c"),
    ] = None,
    deadline: Annotated[
        str | None, typer.Option(metavar="DURATION", help="The longest that the call may take: 500ms, 30s.")
    ] = None,
    max_risk: Annotated[
        RiskCeiling, typer.Option(help="The risk up to which the call is made.")
    ] = RiskCeiling.ADMIN,
    *,
    remote_options: remote.RemoteOptions,
    as_json: AsJson = False,
) -> None:
    """Call one tool of an MCP server, and print its result.

    Exit codes: 10 timeout, 11 unauthorized, 12 not found, 13 invalid arguments, 14 provider failure.
    """
    given = _arguments(arguments, from_stdin=from_stdin)
    deadline_s = None if deadline is None else milliseconds(deadline) / 1000
    result = remote.run_command(_called(remote_options, name, given, deadline_s, max_risk), as_json=as_json)
    _print(result, field, as_json=as_json)


async def _called(
    options: remote.RemoteOptions,
    name: str,
    arguments: dict[str, Any],
    deadline_s: float | None,
    risk: RiskCeiling,
) -> "ToolResult":
    from relay.remote_tools import Permissions, Risk  # noqa: PLC0415 - for a command that runs

    progress = _Progress()
    # The pattern that matches this name alone.
    literal = "".join(f"[{char}]" if char in "*?[" else char for char in name)
    permissions = Permissions((literal,), Risk(risk), scopes=None)
    async with options.client(permissions) as client:
        showing = asyncio.create_task(progress.show())
        try:
            return await client.execute(name, arguments, deadline_s=deadline_s, on_progress=progress.note)
        finally:
            showing.cancel()
            with suppress(asyncio.CancelledError):
                await showing


class _Progress:
    """One line on standard error while a call takes more than a second; rewritten if that is a terminal."""

    text = ""

    async def note(self, progress: float, total: float | None, message: str | None) -> None:
        """Keep what the server reports."""
        share = f"{progress:g}" if total is None else f"{progress:g} of {total:g}"
        self.text = " ".join(part for part in (share, printable(message or "", 60)) if part)

    async def show(self) -> None:
        """Show the seconds and what the server reported, until cancelled."""
        is_terminal = sys.stderr.isatty()
        second = 0
        try:
            while True:
                await asyncio.sleep(_PROGRESS_AFTER_S)
                second += 1
                line = f"waiting, {second} s  {self.text}".rstrip()
                if is_terminal:
                    columns = os.get_terminal_size(sys.stderr.fileno()).columns
                    typer.echo(f"{_CLEAR}{line[: columns - 1]}", err=True, nl=False)
                elif second == 1:
                    typer.echo(line, err=True)
        finally:
            if is_terminal and second:
                typer.echo(_CLEAR, err=True, nl=False)


def _arguments(text: str | None, *, from_stdin: bool) -> dict[str, Any]:
    if from_stdin and text is not None:
        fail("--stdin and arguments exclude each other", EXIT_USAGE)
    given: str | bytes | None = sys.stdin.buffer.read(_MAX_ARGUMENTS + 1) if from_stdin else text
    if given is None:
        return {}
    try:
        value = json.loads(given) if len(given) <= _MAX_ARGUMENTS else None
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        fail('the arguments are not a JSON object, for example \'{"message": "ping"}\'', EXIT_USAGE)
    return value


def _print(result: "ToolResult", field: str | None, *, as_json: bool) -> None:
    content = [block.model_dump(by_alias=True, exclude_none=True, mode="json") for block in result.content]
    if field is not None:
        value = _member(result.structured, field)
        # As JSON, all but printable ASCII is escaped; a plain text is made so.
        plain = isinstance(value, str) and not as_json
        typer.echo(printable(value, 10 * len(value)) if plain else json.dumps(value))
    elif as_json:
        document = {
            "structured": result.structured,
            "content": content,
            "correlation_id": result.correlation_id,
            "remote_correlation_id": result.remote_correlation_id,
            "attempts": result.attempts,
        }
        typer.echo(json.dumps(document))
    elif result.structured is not None:
        typer.echo(json.dumps(result.structured, indent=2))
    else:
        for block in content:
            _print_block(block)


def _print_block(block: dict[str, Any]) -> None:
    if block["type"] != "text":
        typer.echo(json.dumps({**block, "data": "..."} if "data" in block else block))
        return
    for line in block["text"].splitlines():
        typer.echo(printable(line, 10 * len(line)))


def _member(value: Any, path: str) -> Any:
    for name in path.split("."):
        if isinstance(value, list) and name.isdecimal() and int(name) < len(value):
            value = value[int(name)]
        elif isinstance(value, dict) and name in value:
            value = value[name]
        else:
            near = nearest(name, value if isinstance(value, dict) else ())
            fail(f"the result has no member {printable(path)}{near}", EXIT_NO)
    return value


def _show(surveyed: "Sequence[Surveyed]") -> None:
    width = shutil.get_terminal_size((120, 24)).columns
    rows = [
        (
            tool.contract.name,
            _safety(tool.contract),
            "yes" if tool.contract.idempotent else "no",
            tool.contract.version,
            str(tool.refusal.reason) if tool.refusal else "ready",
            printable(tool.contract.description.strip().partition("\n")[0], 400),
        )
        for tool in sorted(surveyed, key=lambda tool: tool.contract.name)
    ]
    header = ("NAME", "SAFETY (BY)", "REPEATABLE", "VERSION", "STATE", "DESCRIPTION")
    taken = sum(max(len(row[column]) for row in (header, *rows)) + 2 for column in range(len(header) - 1))
    space = max(_NARROW, width - taken)
    cut = (text if len(text) <= space else text[: space - 3] + "..." for *_, text in rows)
    show_table(header, [(*row[:-1], text) for row, text in zip(rows, cut, strict=True)])
    for tool in surveyed:
        if tool.refusal is not None:
            typer.echo(f"\n{printable(tool.contract.name)}: {tool.refusal}\n  {tool.refusal.suggested_fix}")


def _safety(contract: "ToolContract") -> str:
    """Return the safety class, and whose word it is; without a signature ``--max-risk`` counts admin."""
    if contract.safety_class is None:
        return "unknown"
    return f"{contract.safety_class} ({'manifest' if contract.risk_source == 'manifest' else 'hub'})"


def _document(tool: "Surveyed") -> dict[str, Any]:
    contract = tool.contract
    return {
        "name": contract.name,
        "canonical_name": contract.canonical_name,
        "version": contract.version,
        "title": contract.title,
        "description": contract.description,
        "input_schema": contract.input_schema,
        "output_schema": contract.output_schema,
        "safety_class": contract.safety_class,
        "risk": contract.risk,
        "risk_source": contract.risk_source,
        "required_scopes": sorted(contract.required_scopes),
        "idempotent": contract.idempotent,
        "deadline_s": contract.deadline_s,
        "digest": contract.digest,
        "refusal": str(tool.refusal) if tool.refusal else None,
    }


login_app = group("Keep the server that is called.")


@login_app.command(epilog=example("relay login https://relay.example --token-file agent-token"))
def login(
    url: Annotated[
        str | None, typer.Argument(metavar="URL", help="The MCP server. Not needed by --remove.")
    ] = None,
    token_file: Annotated[Path | None, remote.kept_token("beside the profile")] = None,
    root: remote.Root = None,
    plain: remote.Plain = False,
    remove: Annotated[bool, typer.Option("--remove", help="Forget it, and a token that was kept.")] = False,
    as_json: AsJson = False,
) -> None:
    """Keep a server and its token for `relay tools` and `relay call`, which then need no option for it.

    Lists the tools first, and keeps nothing if that fails. A later login replaces the server.
    """
    path = remote.profile_path()
    act_as_owner_of(path.parent)
    own_token = path.with_name("profile.token")
    if remove:
        existed = path.exists()
        path.unlink(missing_ok=True)
        own_token.unlink(missing_ok=True)
        result = f"{path} is removed." if existed else "No server was kept."
        answer({"profile": str(path), "removed": existed}, as_json=as_json, result=result)
        return
    if url is None:
        fail("the URL is missing: the MCP server, for example https://relay.example", EXIT_USAGE)
    named, before = remote.with_path(url), remote.kept_profile()
    is_for_it = before is not None and before.url == named
    with (
        nullcontext(check_token_file(token_file))
        if token_file is not None
        else remote.new_token(own_token, is_for_it=is_for_it)
    ) as tried:
        options = remote.RemoteOptions(named, token_file=tried, root=root, plain=plain)
        listed = remote.run_command(remote.survey(options), as_json=as_json)
    profile = Profile(
        url=named,
        token_file=check_token_file(token_file or own_token),
        root=root.absolute() if root is not None else None,
        plain=plain,
    )
    profile.write(path)
    answer(
        {"profile": str(path), "url": profile.url, "tools": len(listed)},
        as_json=as_json,
        result=f"{len(listed)} tools are listed. `relay tools` and `relay call` now use {profile.url}.",
        note=f"{path} is written.",
    )
