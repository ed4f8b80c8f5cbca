"""The options that several commands of the relay share, and how they print times and tables.

Must not contain what a command does.
"""

import inspect
import json
import os
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from datetime import UTC, datetime
from functools import partial, update_wrapper
from inspect import Parameter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from relay.cli.exits import fail
from relay.settings.config import (
    DEFAULT_PUBLIC_URL,
    DEFAULT_TENANT,
    SERVICE_STATE_DIR,
    StateFiles,
    own_state_dir,
)
from relay.settings.kept import read_kept, write_kept
from schemas.addresses import normal_url
from schemas.error_roots import NoStateDirError
from schemas.labels import columns_of, legible
from schemas.process.command_errors import EXIT_USAGE
from schemas.process.state_owner import act_as_owner_of, home_directory, usual_directory
from schemas.times import DurationError, parse_duration_ms, parse_duration_s

if TYPE_CHECKING:
    from relay.settings.table import LoadedRelaySettings
    from schemas.settings import Sources

StateDir = Annotated[
    Path | None, typer.Option("--state-dir", metavar="DIRECTORY", help="The relay's state directory.")
]
Tenant = Annotated[
    str | None, typer.Option(help="The tenant. Default: the first that a command was given, else `default`.")
]
PublicUrl = Annotated[
    str | None,
    typer.Option(
        "--public-url",
        metavar="URL",
        help="The URL of the relay for nodes and agents. Default: as given before, "
        f"else {DEFAULT_PUBLIC_URL}.",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]


@dataclass(frozen=True, slots=True)
class FleetOptions:
    """The options of a command that reads what a running relay lists."""

    url: Annotated[
        str | None,
        typer.Option(metavar="URL", help="Where the relay is reached. Default: its public URL."),
    ] = None
    token_file: Annotated[
        Path | None,
        typer.Option(help="The file of a bearer token, mode 0600; or in EDGE_TOKEN. Default: one is signed."),
    ] = None
    root: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="The root of the relay's certificate, PEM. Default: its own CA's too."
        ),
    ] = None
    watch: Annotated[
        bool, typer.Option("--watch", help="Show it again when it has changed, until Ctrl-C.")
    ] = False
    public_url: PublicUrl = None


_ID_CHARS = 26


def takes_options(command: Callable[..., None]) -> Callable[..., None]:
    """Return ``command`` with, in the place of each parameter of a dataclass, an option for each field."""
    own = inspect.signature(command).parameters
    groups: Mapping[str, Any] = {
        name: each.annotation for name, each in own.items() if is_dataclass(each.annotation)
    }
    parameters = [
        option.replace(kind=Parameter.KEYWORD_ONLY)
        for name, parameter in own.items()
        for option in (
            [
                Parameter(each.name, Parameter.KEYWORD_ONLY, default=each.default, annotation=each.type)
                for each in fields(groups[name])
            ]
            if name in groups
            else [parameter]
        )
    ]

    def with_options(**given: Any) -> None:
        made = {
            name: group(**{each.name: given.pop(each.name) for each in fields(group)})
            for name, group in groups.items()
        }
        command(**made, **given)

    update_wrapper(with_options, command)
    with_options.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return with_options


def state_files(state_dir: Path | None) -> StateFiles:
    """Return the state directory that was named: here, in the environment or the file; else the usual one.

    Root goes on as its owner.

    Raises:
        ConfigError: it is not named here, and the settings cannot be used; or it is named nowhere, and there
            is no usual one.
    """
    if state_dir is None:
        from relay.settings.table import RELAY, STATE_DIR  # noqa: PLC0415 - a command that is told does without it
        from schemas.settings import read_sources  # noqa: PLC0415 - as above

        state_dir = read_sources(RELAY, {}, None, os.environ).value(STATE_DIR)
    directory = state_dir or usual_state_dir()
    if directory is None:
        raise NoStateDirError
    act_as_owner_of(directory)
    return StateFiles(directory)


def settings_of_start(sources: "Sources", *, for_good: bool = False) -> "LoadedRelaySettings":
    """Return the settings of the relay as a start has them. Root goes on as their owner.

    Raises:
        ConfigError: as ``load_settings``; or ``sources`` are of another file than an earlier start was told.
        KeptSettingsError, OSError: as ``load_settings``.
    """
    from relay.settings.table import load_settings  # noqa: PLC0415 - as above

    loaded = load_settings(sources, usual_state_dir(), partial(act_as_owner_of, for_good=for_good))
    loaded.told.check_file(sources)
    return loaded


def settings_for_command(sources: "Sources") -> "LoadedRelaySettings":
    """Return the settings of the relay, of the file that a start was told unless ``sources`` name one.

    Raises:
        ConfigError, KeptSettingsError, OSError: as ``load_settings``.
    """
    from relay.settings.table import RELAY, STATE_DIR, load_settings  # noqa: PLC0415 - as above
    from schemas.settings import read_sources  # noqa: PLC0415 - as above

    loaded = load_settings(sources, usual_state_dir(), act_as_owner_of)
    told = loaded.told.other_file(sources)
    if told is None:
        return loaded
    flags = {**sources.flags, STATE_DIR.name: str(loaded.state.root)}
    return load_settings(read_sources(RELAY, flags, told, os.environ), loaded.state.root)


def usual_state_dir() -> Path | None:
    """Return the state directory that is used unless the operator names another; None if there is none."""
    return usual_directory(SERVICE_STATE_DIR, own_state_dir(home_directory()))


def public_url(given: str | None, state: StateFiles) -> str:
    """Return the relay's URL: the one given here, or as a setting, or kept; else the default."""
    if given is None:
        from relay.settings.table import PUBLIC_URL, RELAY  # noqa: PLC0415 - as above
        from schemas.settings import read_sources  # noqa: PLC0415 - as above

        given = read_sources(RELAY, {}, None, os.environ).value(PUBLIC_URL)
    return normal_url(given or read_kept(state.settings).public_url or DEFAULT_PUBLIC_URL)


def tenant_name(given: str | None, state: StateFiles) -> str:
    """Return the tenant: the one given here, else the one that is kept, else the default."""
    return given or read_kept(state.settings).tenant or DEFAULT_TENANT


def keep_first(state: StateFiles, **given: str | None) -> None:
    """Keep what a command was given and has used, where nothing is kept yet: the first one is the default."""
    kept = read_kept(state.settings)
    new = {name: value for name, value in given.items() if value and getattr(kept, name) is None}
    if new:
        write_kept(state.settings, replace(kept, **new))


def seconds(text: str) -> int:
    """Return the seconds of a duration such as ``90s``, ``15m``, ``1h30m`` or ``30d``."""
    try:
        return parse_duration_s(text)
    except DurationError as error:
        fail(str(error), EXIT_USAGE)


def milliseconds(text: str) -> int:
    """Return the milliseconds of a duration such as ``500ms`` or ``30s``."""
    try:
        return parse_duration_ms(text)
    except DurationError as error:
        fail(str(error), EXIT_USAGE)


def answer(facts: Mapping[str, Any], *, as_json: bool, result: str = "", note: str = "") -> None:
    """Print what was done: ``facts`` for programs, else ``result``, and ``note`` on standard error."""
    if as_json:
        typer.echo(json.dumps(facts))
        return
    if note:
        typer.echo(note, err=True)
    if result:
        typer.echo(result)


def listing(
    facts: Sequence[Mapping[str, Any]],
    header: Sequence[str],
    row: Callable[[Mapping[str, Any]], Sequence[str]],
    *,
    as_json: bool,
) -> None:
    """Print ``facts``, as JSON for programs, else as a table with one ``row`` for each."""
    if as_json:
        typer.echo(json.dumps(facts))
    else:
        show_table(header, [row(each) for each in facts])


def is_terminal() -> bool:
    """Return whether results are read by a person."""
    return sys.stdout.isatty()


def utc(time_ms: int) -> str:
    """Return a time as people read it."""
    return datetime.fromtimestamp(time_ms // 1000, UTC).strftime("%Y-%m-%d %H:%M")


def show_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print ``rows`` in columns below ``header``. On a terminal long cells are cut, but no id."""
    lines = [header, *([legible(cell) for cell in row] for row in rows)]
    widths = [max(columns_of(line[column]) for line in lines) for column in range(len(header))]
    if is_terminal():
        widths = narrowed(widths, shutil.get_terminal_size((120, 24)).columns)
    for line in lines:
        padded = (_padded(cell, width) for cell, width in zip(line, widths, strict=True))
        typer.echo("  ".join(padded).rstrip())


def narrowed(widths: Sequence[int], space: int) -> list[int]:
    """Return ``widths`` with the widest made smaller until a line fits ``space``, or none exceeds an id."""
    result = list(widths)
    while sum(result) + 2 * (len(result) - 1) > space and max(result) > _ID_CHARS:
        result[result.index(max(result))] -= 1
    return result


def _padded(cell: str, width: int) -> str:
    if columns_of(cell) > width:
        while columns_of(cell) > width - 3:
            cell = cell[:-1]
        cell += "..."
    return cell + " " * (width - columns_of(cell))
