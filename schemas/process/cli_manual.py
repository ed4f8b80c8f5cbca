"""How commands present themselves: whole help, an example in each, errors of one line, loading on demand.

What stands for a value in the help, and what converts it, are here too: Typer would load pydantic for it.
Must not know a command.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, ClassVar

import typer
from typer.core import TyperCommand, TyperGroup

from schemas.error_roots import CommandLineError
from schemas.faults import without_secrets
from schemas.text import printable
from schemas.unknown_names import none_of, unknown

_CONTEXT = {"help_option_names": ["-h", "--help"]}


class Manual(TyperGroup):
    """A group of commands. Those in ``on_demand``, as ``module:attribute``, are loaded when they are used."""

    on_demand: ClassVar[Mapping[str, str]] = {}

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the options of the group itself."""
        return with_placeholders(with_plain_values(super().get_params(ctx)))

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names of all commands."""
        return [*self.on_demand, *(name for name in super().list_commands(ctx) if name not in self.on_demand)]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return a command; None if there is none of that name."""
        if cmd_name not in self.on_demand:
            return super().get_command(ctx, cmd_name)
        module, _, attribute = self.on_demand[cmd_name].partition(":")
        return typer.main.get_command(getattr(import_module(module), attribute))

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the group's own options; without any word, show its help."""
        if not args:
            return super().parse_args(ctx, args)
        with mistakes_in_one_line(ctx):
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
        """Return its options and arguments."""
        return with_placeholders(with_plain_values(super().get_params(ctx)))

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse its options and arguments."""
        with mistakes_in_one_line(ctx):
            return super().parse_args(ctx, args)


class Commands(typer.Typer):
    """What commands are added to."""

    def command(self, name: str | None = None, **options: Any) -> Any:
        """Return a decorator that adds a command, as Typer's own does."""
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
def mistakes_in_one_line(context: Any) -> Iterator[None]:
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
