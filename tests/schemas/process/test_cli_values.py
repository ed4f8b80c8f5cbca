from enum import StrEnum
from pathlib import Path
from typing import Annotated

import pytest
import typer

from schemas.error_roots import CommandLineError
from schemas.process.cli_manual import group


class Colour(StrEnum):
    RED = "red"


def taken_from(*arguments: str) -> list[object]:
    """Return what a command is called with."""
    app = group("A group.")
    taken: list[object] = []

    @app.command()
    def command(  # noqa: PLR0913, PLR0917 - one of each form
        first: str,
        rest: Annotated[list[Path] | None, typer.Argument()] = None,
        place: Annotated[Path | None, typer.Option()] = None,
        usual: Annotated[Path, typer.Option()] = Path("/usual"),
        words: Annotated[list[str] | None, typer.Option()] = None,
        colour: Annotated[Colour, typer.Option()] = Colour.RED,
        count: Annotated[int | None, typer.Option(min=1)] = None,
        flag: Annotated[bool, typer.Option("--flag")] = False,  # noqa: FBT002 - as typer wants it
    ) -> None:
        taken.extend((first, rest, place, usual, words, colour, count, flag))

    app(list(arguments), standalone_mode=False)
    return taken


def test_what_is_typed_arrives_in_its_type() -> None:
    typed = taken_from(
        *("a", "/b", "c/d", "--place", "/x y", "--usual", "", "--words", "1", "--words", "2"),
        *("--colour", "red", "--count", "3", "--flag"),
    )
    assert typed == [
        *("a", [Path("/b"), Path("c/d")], Path("/x y"), Path(), ["1", "2"], Colour.RED, 3, True),
    ]


def test_what_is_not_typed_has_its_default() -> None:
    assert taken_from("a") == ["a", None, None, Path("/usual"), None, Colour.RED, None, False]


@pytest.mark.parametrize("arguments", [["\udcff"], ["a", "--place", "\udcff"], ["a", "--words", "x\udcff"]])
def test_bytes_that_are_no_text_are_a_wrong_command_line(arguments: list[str]) -> None:
    with pytest.raises(CommandLineError, match="not text in UTF-8"):
        taken_from(*arguments)


@pytest.mark.parametrize(
    "arguments", [["a", "--colour", "blue"], ["a", "--count", "0"], ["a", "--count", "x"]]
)
def test_other_types_are_checked_as_ever(arguments: list[str]) -> None:
    with pytest.raises(CommandLineError):
        taken_from(*arguments)
