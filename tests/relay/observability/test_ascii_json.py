"""JSON in ASCII for lines and answers."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relay.observability.ascii_json import encoded, members_of

TEXTS = st.text(st.characters(exclude_categories=["Cs"]))
SCALARS = st.none() | st.booleans() | st.integers(-(2**53), 2**53) | TEXTS
DOCUMENTS = st.recursive(SCALARS, lambda inner: st.lists(inner) | st.dictionaries(st.text("abc"), inner))


@given(DOCUMENTS)
def test_what_is_encoded_is_printable_ascii_and_reads_as_it_was(value: Any) -> None:
    text = encoded(value)
    assert text.isascii()
    assert text.isprintable()
    assert json.loads(text) == value


@pytest.mark.parametrize("text", ["\x7f", "\x1b[2J", "\n", "\u202e", "ä"])
def test_no_control_character_reaches_a_terminal(text: str) -> None:
    assert encoded({"tool": text}).isprintable()
    assert json.loads(encoded({text: text})) == {text: text}


@pytest.mark.parametrize("value", ["\ud800", object(), {"a": ["\udfff"]}])
def test_what_json_has_no_form_for_is_an_error(value: object) -> None:
    with pytest.raises(ValueError, match=r"serialize|surrogate"):
        encoded(value)


def test_members_are_an_object_without_its_braces() -> None:
    assert members_of({"code": "ok", "count": 1}) == '"code":"ok","count":1'
    assert members_of({}) == ""
