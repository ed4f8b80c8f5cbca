import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.text import (
    changed_at,
    free_text,
    inert,
    is_bearer_token,
    nearest,
    none_of,
    printable,
    printable_values,
    unknown,
)

ANYTHING = st.text(st.characters())
ASCII = st.text(st.characters(min_codepoint=0x20, max_codepoint=0x7E))


@given(ANYTHING, st.integers(0, 40))
def test_whatever_goes_in_printable_ascii_of_the_limit_comes_out(text: str, limit: int) -> None:
    safe = printable(text, limit)
    assert safe.isascii()
    assert safe.isprintable()
    assert len(safe) <= limit


@given(ASCII)
def test_printable_ascii_stays_as_it_is(text: str) -> None:
    assert printable(text, len(text)) == text


@pytest.mark.parametrize(
    ("text", "safe"),
    [
        pytest.param("a\x1b[31mb", "a\\x1b[31mb", id="a-terminal-escape"),
        pytest.param("a\nb\r\tc", "a\\nb\\r\\tc", id="lines-and-tabs"),
        pytest.param("\x00\x7f", "\\x00\\x7f", id="nul-and-delete"),
        pytest.param("\u202eevil", "\\u202eevil", id="right-to-left-override"),
        pytest.param("z\u200bw", "z\\u200bw", id="zero-width-space"),
        pytest.param("caf\xe9", "caf\\xe9", id="latin"),
        pytest.param("\U0001f600", "\\U0001f600", id="an-emoji"),
        pytest.param("\ud800", "\\ud800", id="a-lone-surrogate"),
        pytest.param("", "", id="nothing"),
    ],
)
def test_everything_else_is_escaped(text: str, safe: str) -> None:
    assert printable(text) == safe


def test_a_long_text_is_cut_at_256_characters_unless_told_otherwise() -> None:
    assert printable("a" * 1000) == "a" * 256
    assert printable("\n" * 1000) == "\\n" * 128
    assert printable("abc", 2) == "ab"


def test_every_string_in_a_value_is_made_printable_and_nothing_else_is_changed() -> None:
    value = {"a\n": ["\x1b", {"b": "\u202e"}, 1, 1.5, True, None], "c": "plain"}
    assert printable_values(value) == {
        "a\\n": ["\\x1b", {"b": "\\u202e"}, 1, 1.5, True, None],
        "c": "plain",
    }


@given(ANYTHING)
def test_strings_in_a_value_are_escaped_but_never_cut(text: str) -> None:
    assert printable_values(text) == printable(text, 10 * len(text) + 1)
    assert len(printable_values(text)) >= len(text)


@given(ANYTHING)
def test_keys_in_a_value_are_escaped_but_never_cut(text: str) -> None:
    assert printable_values({text: [{text: None}]}) == {
        printable_values(text): [{printable_values(text): None}],
    }


@pytest.mark.parametrize("unit", ["a", "\n", "\u202e", "\U0001f600"], ids=ascii)
def test_long_keys_that_differ_at_the_end_stay_two(unit: str) -> None:
    safe = printable_values({unit * 1000 + "a": 1, unit * 1000 + "b": 2})
    assert safe == {printable(unit) * 1000 + "a": 1, printable(unit) * 1000 + "b": 2}


def test_the_value_that_was_given_is_not_changed() -> None:
    value: dict[str, Any] = {"a": ["\n"]}
    printable_values(value)
    assert value == {"a": ["\n"]}


@given(ANYTHING, st.integers(0, 80))
def test_what_is_inert_has_no_blank_and_is_within_the_limit(text: str, limit: int) -> None:
    shown = inert(text, limit)
    assert re.fullmatch(r"[A-Za-z0-9._/:@+\\-]*", shown)
    assert len(shown) <= limit


@pytest.mark.parametrize(
    ("text", "limit", "shown"),
    [
        pytest.param("/media/usb-1", 64, "/media/usb-1", id="plain"),
        pytest.param("a b", 64, "a\\x20b", id="a blank"),
        pytest.param(
            "\n\x1b\u202e\U0001f600\ud800",
            64,
            "\\n\\x1b\\u202e\\U0001f600\\ud800",
            id="what is not printable",
        ),
        pytest.param('"\\', 64, "\\x22\\", id="what JSON escapes"),
        pytest.param("ab cd", 5, "ab", id="no half an escape"),
        pytest.param("ab cd", 6, "ab\\x20", id="a whole one"),
        pytest.param("abc", 2, "ab", id="cut"),
    ],
)
def test_inert_text_is_escaped_and_cut(text: str, limit: int, shown: str) -> None:
    assert inert(text, limit) == shown


@given(ANYTHING, st.integers(0, 80))
def test_what_one_end_has_escaped_stays_as_it_is_at_the_other(text: str, limit: int) -> None:
    for escaped in (inert, free_text):
        shown = escaped(text, limit)
        assert len(shown) <= limit
        assert escaped(shown, limit) == shown


@given(ANYTHING, st.integers(0, 80))
def test_a_free_text_is_printable_ascii_with_single_blanks(text: str, limit: int) -> None:
    assert re.fullmatch(r"(?:[\x21-\x7E]| (?! ))*", free_text(text, limit))


@pytest.mark.parametrize(
    ("text", "limit", "shown"),
    [
        pytest.param("New connection from [::1]: 'a'", 64, "New connection from [::1]: 'a'", id="prose"),
        pytest.param("T\u00fcr offen\n", 64, "T\\xfcr offen\\n", id="other letters and a line end"),
        pytest.param("a   b", 64, "a \\x20\\x20b", id="blanks that could hide what follows"),
        pytest.param("\x1b[31m\u202e\u200b\ud800", 64, "\\x1b[31m\\u202e\\u200b\\ud800", id="not visible"),
        pytest.param("abcdefghij", 9, "abcd[cut]", id="cut"),
        pytest.param("abc\u00fcdefgh", 11, "abc[cut]", id="no half an escape"),
        pytest.param("\u00fc" * 32_768, 32_768, "\\xfc" * 8190 + "[cut]", id="a long one"),
    ],
)
def test_a_free_text_stays_readable_and_says_that_it_is_cut(text: str, limit: int, shown: str) -> None:
    assert free_text(text, limit) == shown


def test_only_the_strings_at_the_path_are_changed() -> None:
    value: dict[str, Any] = {
        "a": [{"b": "x", "c": "x"}, {"b": 1}, {}, "x"],
        "b": "x",
        "d": {"b": ["x", ["x"]]},
    }
    assert changed_at(value, ("a", "b"), str.upper) == {
        **value,
        "a": [{"b": "X", "c": "x"}, {"b": 1}, {}, "x"],
    }
    assert changed_at(value, ("d", "b"), str.upper)["d"] == {"b": ["X", ["X"]]}
    assert changed_at(value, ("nowhere",), str.upper) == value
    assert value["a"][0] == {"b": "x", "c": "x"}


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


@pytest.mark.parametrize("text", ["t", "eyJh.eyJz.c2ln", "a" * 8192, "!~"])
def test_printable_ascii_is_a_bearer_token(text: str) -> None:
    assert is_bearer_token(text)


@pytest.mark.parametrize("text", ["", "a" * 8193, "two words", "line\n", "a\r\nHost: b", "caf\u00e9", "\x7f"])
def test_what_could_end_or_break_a_header_is_none(text: str) -> None:
    assert not is_bearer_token(text)
