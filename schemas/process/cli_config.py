"""The options of a command that takes settings, and ``config check`` and ``config show`` of both programs.

Must not know a setting, and must not change anything.
"""

import json
import os
from collections.abc import Callable, Container, Iterable, Iterator
from functools import wraps
from inspect import Parameter, signature
from pathlib import Path
from typing import Annotated, Any, Protocol

import typer

from schemas.error_roots import ConfigError
from schemas.process.cli_manual import example
from schemas.process.command_errors import EXIT_CONFIG
from schemas.settings import Form, Program, Setting, Settings, Sources, read_sources, text_of
from schemas.text import quoted

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]


class Loaded(Protocol):
    """Settings as the program's loader has read them."""

    @property
    def settings(self) -> Settings: ...

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds that an installed package must bring."""

    @property
    def kinds_directory(self) -> Path | None:
        """Where packages are installed for their kinds alone; None if nowhere."""

    def config(self) -> object:
        """Return what the program runs with.

        Raises:
            ConfigError: the settings cannot be used.
        """


def add_commands(
    app: typer.Typer,
    program: Program,
    load: Callable[[Sources], Loaded],
    read_at_start: Iterable[Setting[Path]] = (),
) -> None:
    """Add the commands of ``program``, whose loader ``load`` is, to ``app``.

    ``read_at_start`` name the files without which it does not start.
    """
    name = program.name

    @app.command(
        epilog=example(f"{name} config check --config ./{name}.toml"),
        help=f"Check the settings as `{name} run` would read them. Exit 78 if they cannot be used.",
    )
    @takes_settings(program)
    def check(sources: Sources, as_json: AsJson = False) -> None:
        loaded, problems = _checked(lambda: load(sources), read_at_start)
        file = None if sources.file is None else str(sources.file)
        given = {} if loaded is None else given_in(loaded.settings)
        if as_json:
            document = {"valid": not problems, "file": file, "problems": problems, "given": given}
            typer.echo(json.dumps(document))
        else:
            for problem in problems:
                typer.echo(problem, err=True)
            if loaded is not None and not problems:
                typer.echo(f"valid: {file or 'no file, the environment and the options'}")
                for line in as_toml(loaded.settings, given):
                    typer.echo(line)
        if problems:
            raise SystemExit(EXIT_CONFIG)

    @app.command(epilog=example(f"{name} config show"))
    @takes_settings(program)
    def show(sources: Sources, as_json: AsJson = False) -> None:
        """Show each setting as a line of the file, and where its value comes from."""
        settings = load(sources).settings
        if as_json:
            typer.echo(json.dumps(as_document(settings)))
            return
        for line in as_toml(settings):
            typer.echo(line)


def _checked(
    load: Callable[[], Loaded], read_at_start: Iterable[Setting[Path]]
) -> tuple[Loaded | None, tuple[str, ...]]:
    """Return the settings, if they can be read, and why the program would not start.

    Kinds are read too where it is not enrolled yet.
    """
    from schemas.registry import read_contract  # noqa: PLC0415 - the validator, for this command alone

    problems: tuple[str, ...] = ()
    try:
        loaded = load()
    except ConfigError as error:
        return None, error.problems
    for step in (loaded.config, lambda: read_contract(loaded.kinds, loaded.kinds_directory)):
        try:
            step()
        except ConfigError as error:
            problems += error.problems
    # Not of settings that contradict each other: a start with those might not read it.
    return loaded, problems or tuple(_missing(loaded.settings, read_at_start))


def _missing(settings: Settings, named: Iterable[Setting[Path]]) -> Iterator[str]:
    for setting in named:
        try:
            if (path := settings.get(setting)) is not None:
                path.stat()
        except (FileNotFoundError, NotADirectoryError):
            yield f"{settings.source(setting)}: {setting.name} {quoted(str(path))} is not there"
        except OSError:
            continue  # the service's user may see what this one does not


_CONFIG = "config"
_NO = "--no-"


def takes_settings(
    program: Program, *only: Setting[Any]
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command an option for each setting of ``program``, or for ``only`` these, and ``--config``.

    The command is called with the sources first, and then with its own options.
    """
    taken = only or program.options

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @wraps(command)
        def with_sources(**options: Any) -> None:
            values = {setting.name: options.pop(setting.name) for setting in taken}
            flags = {name: text_of(value) for name, value in values.items() if value not in (None, [])}
            command(read_sources(program, flags, options.pop(_CONFIG), os.environ), **options)

        # As the parser wants it: by name alone, which also allows a command's own options to have no default.
        own = [each.replace(kind=Parameter.KEYWORD_ONLY) for each in signature(command).parameters.values()][
            1:
        ]
        options = [*map(_option, taken), _config_option(program)]
        with_sources.__signature__ = signature(command).replace(parameters=[*options, *own])  # type: ignore[attr-defined]
        with_sources.__annotations__ = {each.name: each.annotation for each in (*options, *own)}
        return with_sources

    return decorate


def _option(setting: Setting[Any]) -> Parameter:
    is_flag = setting.form is Form.FLAG
    # Nothing turns off what is itself a no: the thing is named instead.
    has_negation = is_flag and not setting.flag.startswith(_NO)
    flag = f"{setting.flag}/{_NO}{setting.flag.removeprefix('--')}" if has_negation else setting.flag
    default = f" Default: {setting.default}." if setting.default is not None and not is_flag else ""
    option = typer.Option(flag, metavar=None if is_flag else setting.metavar, help=setting.doc + default)
    kind: Any = bool if is_flag else list[str] if setting.form is Form.LIST else str
    return Parameter(
        setting.name, Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind | None, option]
    )


def _config_option(program: Program) -> Parameter:
    text = f"The file of the settings, TOML. Default: {program.usual_file}, if it is there."
    option = typer.Option("--config", metavar="FILE", help=text)
    return Parameter(_CONFIG, Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[Path | None, option])


def as_toml(settings: Settings, names: Container[str] | None = None) -> Iterator[str]:
    """Return a line for each setting, which is one of the file, with where its value comes from.

    ``names``: only for those.
    """
    lines = [
        (_toml_line(setting, settings), settings.source(setting))
        for setting in settings.table
        if names is None or setting.name in names
    ]
    width = max((len(line) for line, _ in lines), default=0)
    for line, source in lines:
        yield f"{line:<{width}}  # {source}"


def given_in(settings: Settings) -> dict[str, str]:
    """Return where each value comes from that is not the default."""
    return {name: given.source for name, given in settings.given.items() if given.source != "default"}


def as_document(settings: Settings) -> dict[str, Any]:
    """Return each setting's value as it is in a file, where it comes from, and whether SIGHUP reloads it."""
    return {
        setting.name: {
            "value": _file_value(setting, settings),
            "source": settings.source(setting),
            "reloads": setting.reloads,
        }
        for setting in settings.table
    }


def _toml_line(setting: Setting[Any], settings: Settings) -> str:
    value = _file_value(setting, settings)
    name = json.dumps(setting.name) if setting.form is Form.TABLE else setting.name
    return f"# {name} =" if value is None else f"{name} = {_toml(value)}"


def _toml(value: Any) -> str:
    """Return ``value`` as TOML spells it, which for all but a table is as JSON does."""
    if not isinstance(value, dict):
        return json.dumps(value)
    return f"{{{', '.join(f'{name} = {json.dumps(each)}' for name, each in value.items())}}}"


def _file_value(setting: Setting[Any], settings: Settings) -> Any:
    given = settings.given.get(setting.name)
    if given is None:
        return None
    match setting.form:
        case Form.TEXT:
            return given.text
        case Form.LIST:
            return [str(each) for each in settings[setting]]
        case Form.FLAG:
            return bool(settings[setting])
        case Form.NUMBER:
            return int(settings[setting])
        case Form.TABLE:
            return json.loads(given.text)
