"""What stands for a value in the help: FILE, TEXT, N, or the choices.

Typer would show the type's name in Python. Must not know a command.
"""

from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any

_BY_TYPE: Mapping[Any, str] = {
    str: "TEXT",
    list[str]: "TEXT",
    Path: "FILE",
    list[Path]: "FILE",
    int: "N",
}


def with_placeholders(parameters: Sequence[Any]) -> list[Any]:
    """Return ``parameters``, which from now on show words for their values."""
    for each in parameters:
        if hasattr(each, "type_descriptor"):
            each.display_type = _shown(each)
    return list(parameters)


def _shown(parameter: Any) -> Callable[[Any], str | None]:
    type_, usual = parameter.type_descriptor.annotation, type(parameter).display_type

    def display_type(ctx: Any) -> str | None:
        if isinstance(type_, type) and issubclass(type_, StrEnum):
            return "|".join(type_)
        if parameter.param_type_name == "argument":
            return None  # its name says what it is
        return _BY_TYPE.get(type_) or usual(parameter, ctx=ctx)

    return display_type
