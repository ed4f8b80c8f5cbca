"""A wrong command line is an error of one line: what is wrong, the nearest name, and where help is.

The parser's own errors take four lines. Must not know a command.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import typer

from schemas.error_roots import CommandLineError
from schemas.faults import without_secrets
from schemas.text import printable
from schemas.unknown_names import unknown

_MAX_TEXT = 512
_OF_OTHER_PROGRAMS: Mapping[str, str] = {
    "--ca": "--root",
    "--ca-file": "--root",
    "--cacert": "--root",
    "--cafile": "--root",
    "--token": "--token-file",
}
"""What curl, mosquitto and others call an option, and what it is called here."""
_UsageError: type[Exception] = typer.BadParameter.__mro__[1]
"""Any mistake that the parser finds. Typer exports only this one kind of them."""


@contextmanager
def mistakes_in_one_line(context: Any) -> Iterator[None]:
    """Raise what the parser finds wrong with the command of ``context`` as an error of one line.

    Raises:
        CommandLineError: it has found something.
    """
    try:
        yield
    except _UsageError as error:
        raise CommandLineError(f"{_text(error, context)}; see {context.command_path} -h") from None


def _text(error: Any, context: Any) -> str:
    if hasattr(error, "possibilities"):  # an option that there is not
        return _unknown_option(str(error.option_name), tuple(_options(context)))
    text = " ".join(error.format_message().split()).rstrip(".")
    # A token that was typed where none belongs is not shown again.
    return printable(without_secrets(text[:1].lower() + text[1:]), _MAX_TEXT)


def _unknown_option(name: str, known: tuple[str, ...]) -> str:
    ours = _OF_OTHER_PROGRAMS.get(name)
    return unknown("option", name, (ours,) if ours in known else known)


def _options(context: Any) -> Iterator[str]:
    for each in context.command.get_params(context):
        if not getattr(each, "hidden", False):
            yield from (name for name in (*each.opts, *each.secondary_opts) if name.startswith("-"))
