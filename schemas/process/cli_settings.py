"""The options of a command that takes a program's settings, made from the table of the settings.

Must not know a setting.
"""

import os
from collections.abc import Callable
from functools import wraps
from inspect import Parameter, signature
from pathlib import Path
from typing import Annotated, Any

import typer

from schemas.settings import Form, Setting
from schemas.settings_sources import Program, read_sources, text_of

_CONFIG = "config"
_NO = "--no-"


def takes_settings(
    program: Program, *only: Setting[Any]
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command an option for each setting of ``program``, or for ``only`` these, and ``--config``.

    The command is called with the sources first, and then with its own options.
    """
    taken = only or program.table

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
