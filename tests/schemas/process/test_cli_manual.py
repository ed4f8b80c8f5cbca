"""A wrong command line is one line: what is wrong, the nearest name, and where help is."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import pytest
import typer

from schemas.error_roots import CommandLineError
from schemas.process.cli_manual import Commands, group, program

TOKEN = "eyJhbGciOiJFZERTQSJ9eyJzdWIiOiJtZSJ9c2lnbmF0dXJl"


class Colour(StrEnum):
    RED = "red"
    BLUE = "blue"


@pytest.fixture
def app() -> typer.Typer:
    app = program("edge", "A program.")
    nodes = group("Nodes.")
    app.add_typer(nodes, name="node")

    @nodes.command()
    def label(name: str) -> None: ...

    @nodes.command(hidden=True)
    def labels() -> None: ...

    @app.command()
    def paint(
        colour: Annotated[Colour, typer.Option()] = Colour.RED,
        flag: Annotated[bool, typer.Option("--flag")] = False,  # noqa: FBT002 - as typer wants it
        root: Annotated[str, typer.Option()] = "",
        secret_way: Annotated[str, typer.Option(hidden=True)] = "",
    ) -> None: ...

    assert isinstance(app, Commands)
    return app


def mistake_in(app: typer.Typer, *words: str) -> str:
    with pytest.raises(CommandLineError) as wrong:
        typer.main.get_command(app)(list(words), prog_name="edge")
    return str(wrong.value)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["nod"], "there is no command nod; the nearest is node; see edge -h"),
        (["node", "labels", "extra"], "got unexpected extra argument(s) (extra); see edge node labels -h"),
        (["node", "lables"], "there is no command lables; the nearest is label; see edge node -h"),
        (["--verion"], "there is no option --verion; the nearest is --version; see edge -h"),
        (["paint", "--flagg"], "there is no option --flagg; the nearest is --flag; see edge paint -h"),
        (["paint", "--cacert"], "there is no option --cacert; the nearest is --root; see edge paint -h"),
        (["--cacert"], "there is no option --cacert; the nearest is --version; see edge -h"),
        (["paint", "--colour"], "option '--colour' requires an argument; see edge paint -h"),
        (
            ["paint", "--colour", "bl"],
            "invalid value for '--colour': 'bl' is none of red, blue; the nearest is blue; see edge paint -h",
        ),
        (["node", "label"], "missing argument 'name'; see edge node label -h"),
    ],
    ids=str,
)
def test_a_mistake_is_one_line_with_what_to_do(app: typer.Typer, words: list[str], text: str) -> None:
    assert mistake_in(app, *words) == text


def test_what_the_help_does_not_show_is_not_offered(app: typer.Typer) -> None:
    assert "secret-way" not in mistake_in(app, "paint", "--secret-wa")
    assert "labels;" not in mistake_in(app, "node", "labelss")


@pytest.mark.parametrize(
    "words", [["\x1b[2J"], ["paint", "--\n"], ["paint", "\u202e"], ["paint", "x" * 9999]]
)
def test_what_was_typed_is_shown_as_printable_text(app: typer.Typer, words: list[str]) -> None:
    text = mistake_in(app, *words)
    assert text.isascii()
    assert text.isprintable()
    assert len(text) < 600


def test_a_token_where_none_belongs_is_not_shown_again(app: typer.Typer) -> None:
    assert TOKEN not in mistake_in(app, "paint", TOKEN)
    assert TOKEN not in mistake_in(app, "paint", "--flag", f"--flag={TOKEN}")


@pytest.mark.parametrize("words", [[], ["node"]])
def test_a_group_without_a_word_shows_its_help(
    app: typer.Typer, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        typer.main.get_command(app)(words, prog_name="edge")
    assert ended.value.code == 2
    assert capsys.readouterr().err.startswith("Usage: edge")


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
    "arguments", [["a", "--colour", "green"], ["a", "--count", "0"], ["a", "--count", "x"]]
)
def test_other_types_are_checked_as_ever(arguments: list[str]) -> None:
    with pytest.raises(CommandLineError):
        taken_from(*arguments)
