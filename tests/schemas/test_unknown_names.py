import pytest

from schemas.unknown_names import nearest, none_of, unknown


@pytest.mark.parametrize(
    ("name", "known", "end"),
    [
        ("calll", ["run", "call"], "; the nearest is call"),
        ("", ["run"], "; the nearest is run"),
        ("anything", [], ""),
        ("x" * 100_000, ["xx"], "; the nearest is xx"),
    ],
    ids=["misspelt", "empty", "none is known", "long"],
)
def test_the_nearest_of_what_is_known_is_named(name: str, known: list[str], end: str) -> None:
    assert nearest(name, known) == end


def test_a_name_is_shown_as_printable_text_of_bounded_length() -> None:
    assert unknown("command", "\x1b[2J", ["run"]) == "there is no command \\x1b[2J; the nearest is run"
    assert len(unknown("command", "x" * 100_000, ["run"])) < 150


def test_few_choices_are_all_listed() -> None:
    assert none_of("wirte", ["read", "write"]) == "'wirte' is none of read, write; the nearest is write"
