"""``config check`` and ``config show`` of both programs. Must not change anything."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Protocol

import typer

from schemas.error_roots import ConfigError
from schemas.process.cli_manual import example
from schemas.process.cli_settings import takes_settings
from schemas.process.exit_codes import EXIT_CONFIG
from schemas.settings import Settings
from schemas.settings_report import as_document, as_toml, given_in
from schemas.settings_sources import Program, Sources

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]


class Loaded(Protocol):
    """Settings as the program's loader has read them."""

    @property
    def settings(self) -> Settings:
        """Each setting, and where its value comes from."""

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


def add_commands(app: typer.Typer, program: Program, load: Callable[[Sources], Loaded]) -> None:
    """Add the commands of ``program``, whose loader ``load`` is, to ``app``."""
    name = program.name

    @app.command(
        epilog=example(f"{name} config check --config ./{name}.toml"),
        help=f"Check the settings as `{name} run` would read them. Exit 78 if they cannot be used.",
    )
    @takes_settings(program)
    def check(sources: Sources, as_json: AsJson = False) -> None:
        loaded, problems = _checked(lambda: load(sources))
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


def _checked(load: Callable[[], Loaded]) -> tuple[Loaded | None, tuple[str, ...]]:
    """Return the settings, if they can be read, and why the program would not start.

    Kinds are read too where it is not enrolled yet.
    """
    from schemas.contract import read_contract  # noqa: PLC0415 - the validator, for this command alone

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
    return loaded, problems
