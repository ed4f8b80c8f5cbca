"""How commands present themselves: whole help, an example in each, errors of one line, loading on demand.

Must not know a command.
"""

from collections.abc import Mapping
from importlib import import_module
from typing import Annotated, Any, ClassVar

import typer
from typer.core import TyperCommand, TyperGroup

from schemas.error_roots import CommandLineError
from schemas.process.cli_mistakes import mistakes_in_one_line
from schemas.process.cli_placeholders import with_placeholders
from schemas.process.cli_values import with_plain_values
from schemas.unknown_names import unknown

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
