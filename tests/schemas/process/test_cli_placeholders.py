from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from schemas.process.cli_manual import group


class Colour(StrEnum):
    RED = "red"
    BLUE = "blue"


def test_a_value_is_shown_by_a_word_or_by_its_choices() -> None:
    app = group("A group.")

    @app.command()
    def command(  # noqa: PLR0913, PLR0917 - one of each form
        colour: Annotated[Colour, typer.Argument(metavar="COLOUR")],
        rest: Annotated[list[Path], typer.Argument(metavar="REST")],
        place: Annotated[Path | None, typer.Option()] = None,
        where: Annotated[Path | None, typer.Option(metavar="DIRECTORY")] = None,
        words: Annotated[list[str] | None, typer.Option()] = None,
        count: Annotated[int, typer.Option()] = 1,
        flag: Annotated[bool, typer.Option("--flag")] = False,  # noqa: FBT002 - as typer wants it
        paint: Annotated[Colour, typer.Option()] = Colour.RED,
    ) -> None: ...

    parser = typer.main.get_command(app)
    context = typer.Context(parser)
    shown = [record[0] for each in parser.get_params(context) if (record := each.get_help_record(context))]
    assert shown == [
        "COLOUR red|blue",
        "REST",
        "--place FILE",
        "--where DIRECTORY",
        "--words TEXT",
        "--count N",
        "--flag",
        "--paint red|blue",
        "--help",
    ]
