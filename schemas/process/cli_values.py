"""Converts what is typed on a command line where that takes no library.

Typer converts every value by pydantic, which takes as long to load as all else that a command needs. A Typer
whose parameters have no ``type_descriptor`` does not load it. Must not know a command.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import typer

from schemas.unknown_names import none_of


def _text(value: object) -> str:
    text = str(value)
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        # Python shows bytes of the command line that are none as half characters, which cannot be printed.
        raise typer.BadParameter("it is not text in UTF-8") from None
    return text


def _path(value: object) -> Path:
    return Path(_text(value))


def _choice_of(choices: type[StrEnum]) -> Callable[[object], StrEnum]:
    def convert(value: object) -> StrEnum:
        try:
            return choices(str(value))
        except ValueError:
            raise typer.BadParameter(none_of(str(value), choices)) from None

    return convert


_BY_TYPE_ALONE: Mapping[Any, Callable[[object], Any]] = {str: _text, list[str]: _text, Path: _path}


def _conversion_to(type_: Any) -> Callable[[object], Any] | None:
    if isinstance(type_, type) and issubclass(type_, StrEnum):
        return _choice_of(type_)
    return _BY_TYPE_ALONE.get(type_)


def with_plain_values(parameters: Sequence[Any]) -> list[Any]:
    """Return ``parameters``, which from now on convert texts, paths and choices by their type alone."""
    for each in parameters:
        if hasattr(each, "type_descriptor") and not isinstance(each.get_runtime_param, _Conversion):
            each.get_runtime_param = _Conversion(each.type_descriptor.annotation, each.get_runtime_param)
    return list(parameters)


@dataclass(frozen=True, slots=True)
class _Conversion:
    """The conversion of one parameter's values; ``usual`` returns Typer's."""

    type_: Any
    usual: Callable[[], Any]

    def __call__(self) -> "_Conversion":
        """Return the conversion: this one."""
        return self

    def coerce(self, value: Any, param: Any, ctx: Any) -> Any:
        """Return ``value`` as the command takes it."""
        takes_several = param.multiple or param.nargs == -1
        if value is None:
            return () if takes_several else None
        convert = _conversion_to(self.type_)
        if convert is None:
            return self.usual().coerce(value, param=param, ctx=ctx)
        return [convert(each) for each in value] if takes_several else convert(value)
