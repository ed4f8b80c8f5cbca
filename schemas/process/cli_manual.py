"""How commands present themselves: whole help, an example in each, errors of one line, loading on demand.

What stands for a value in the help, and what converts it, are here too: Typer would load pydantic for it.
Must not know a command.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, ClassVar

import typer
from typer.core import TyperCommand, TyperGroup

from schemas.error_roots import CommandLineError
from schemas.faults import without_secrets
from schemas.text import none_of, printable, unknown

_CONTEXT = {"help_option_names": ["-h", "--help"]}


class Manual(TyperGroup):
    """A group of commands. Those in ``on_demand``, as ``module:attribute``, are loaded when they are used."""

    on_demand: ClassVar[Mapping[str, str]] = {}

    def get_params(self, ctx: Any) -> list[Any]:
        return _prepared(super().get_params(ctx))

    def list_commands(self, ctx: Any) -> list[str]:
        return [*self.on_demand, *(name for name in super().list_commands(ctx) if name not in self.on_demand)]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in self.on_demand:
            return super().get_command(ctx, cmd_name)
        module, _, attribute = self.on_demand[cmd_name].partition(":")
        return typer.main.get_command(getattr(import_module(module), attribute))

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the group's own options; without any word, show its help."""
        if not args:
            return super().parse_args(ctx, args)
        with _mistakes_in_one_line(ctx):
            return super().parse_args(ctx, args)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return the command that ``args`` begin with.

        Raises:
            CommandLineError: there is none of that name.
        """
        names = self.list_commands(ctx)
        if args[0] not in names and not ctx.resilient_parsing:
            shown = (name for name in names if not self.get_command(ctx, name).hidden)
            raise CommandLineError(f"{unknown('command', args[0], shown)}; see {ctx.command_path} -h")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write each command with the first paragraph of its help; the parser's own would cut it."""
        commands = {name: self.get_command(ctx, name) for name in self.list_commands(ctx)}
        rows = [
            (name, " ".join((command.help or "").partition("\n\n")[0].split()))
            for name, command in commands.items()
            if not command.hidden
        ]
        with formatter.section("Commands"):
            formatter.write_dl(rows)


class _Command(TyperCommand):
    """One command."""

    def get_params(self, ctx: Any) -> list[Any]:
        return _prepared(super().get_params(ctx))

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        with _mistakes_in_one_line(ctx):
            return super().parse_args(ctx, args)


class Commands(typer.Typer):
    """What commands are added to."""

    def command(self, name: str | None = None, **options: Any) -> Any:
        return super().command(name, **{"cls": _Command, **options})


def program(name: str, text: str, cls: type[Manual] = Manual) -> typer.Typer:
    """Return the command line of a program, with ``--version`` and completion."""
    app = group(text, name, cls=cls, add_completion=True)

    def show_version(wanted: bool) -> None:  # noqa: FBT001 - as the parser calls it
        if wanted:
            from importlib.metadata import version  # noqa: PLC0415 - it takes long to load

            typer.echo(f"{name} {version('edge-kubelet')}")
            raise typer.Exit

    option = typer.Option("--version", callback=show_version, is_eager=True, help="Show the version.")

    @app.callback(help=text)
    def options(_version: Annotated[bool, option] = False) -> None:
        pass

    return app


def group(
    text: str, name: str | None = None, *, cls: type[Manual] = Manual, add_completion: bool = False
) -> typer.Typer:
    """Return a group of commands that ``text`` introduces."""
    return Commands(
        name=name,
        help=text,
        cls=cls,
        no_args_is_help=True,
        add_completion=add_completion,
        context_settings=_CONTEXT,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
    )


def example(*lines: str) -> str:
    """Return the end of a command's help: command lines that can be copied, never wrapped."""
    return "\n".join(["\b", "Example:", *(f"  {line}" for line in lines)])


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
def _mistakes_in_one_line(context: Any) -> Iterator[None]:
    """Raise what the parser finds wrong with the command of ``context`` as an error of one line.

    Raises:
        CommandLineError: it has found something.
    """
    try:
        yield
    except _UsageError as error:
        raise CommandLineError(f"{_mistake(error, context)}; see {context.command_path} -h") from None


def _mistake(error: Any, context: Any) -> str:
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


def _text(value: object) -> str:
    text = str(value)
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        # Python shows bytes of the command line that are not text as surrogates, which cannot be printed.
        raise typer.BadParameter("it is not text in UTF-8") from None
    return text


def _path(value: object) -> Path:
    return Path(_text(value))


_WORDS: Mapping[Any, str] = {str: "TEXT", list[str]: "TEXT", Path: "FILE", list[Path]: "FILE", int: "N"}
"""What stands for a value of a type in the help."""
_CONVERSIONS: Mapping[Any, Callable[[object], Any]] = {str: _text, list[str]: _text, Path: _path}


def _prepared(parameters: Sequence[Any]) -> list[Any]:
    """Return ``parameters``, which from now on show words for values, and convert them by type alone."""
    for each in parameters:
        if hasattr(each, "type_descriptor"):
            type_ = each.type_descriptor.annotation
            each.display_type = _shown(each, type_)
            if not isinstance(each.get_runtime_param, _Conversion):
                each.get_runtime_param = _Conversion(type_, each.get_runtime_param)
    return list(parameters)


def _is_choice(type_: Any) -> bool:
    return isinstance(type_, type) and issubclass(type_, StrEnum)


def _shown(parameter: Any, type_: Any) -> Callable[[Any], str | None]:
    usual = type(parameter).display_type

    def display_type(ctx: Any) -> str | None:
        if _is_choice(type_):
            return "|".join(type_)
        if parameter.param_type_name == "argument":
            return None  # its name says what it is
        return _WORDS.get(type_) or usual(parameter, ctx=ctx)

    return display_type


def _choice_of(choices: type[StrEnum], value: object) -> StrEnum:
    try:
        return choices(str(value))
    except ValueError:
        raise typer.BadParameter(none_of(str(value), choices)) from None


@dataclass(frozen=True, slots=True)
class _Conversion:
    """The conversion of one parameter's values; ``usual`` returns Typer's."""

    type_: Any
    usual: Callable[[], Any]

    def __call__(self) -> "_Conversion":
        return self

    def coerce(self, value: Any, param: Any, ctx: Any) -> Any:
        takes_several = param.multiple or param.nargs == -1
        if value is None:
            return () if takes_several else None
        convert = partial(_choice_of, self.type_) if _is_choice(self.type_) else _CONVERSIONS.get(self.type_)
        if convert is None:
            return self.usual().coerce(value, param=param, ctx=ctx)
        return [convert(each) for each in value] if takes_several else convert(value)
