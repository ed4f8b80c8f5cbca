"""Printable ASCII without spaces can be sent as a bearer token, and nothing else."""

import pytest

from schemas.bearer_tokens import is_bearer_token


@pytest.mark.parametrize("text", ["t", "eyJh.eyJz.c2ln", "a" * 8192, "!~"])
def test_printable_ascii_is_a_bearer_token(text: str) -> None:
    assert is_bearer_token(text)


@pytest.mark.parametrize("text", ["", "a" * 8193, "two words", "line\n", "a\r\nHost: b", "caf\u00e9", "\x7f"])
def test_what_could_end_or_break_a_header_is_none(text: str) -> None:
    assert not is_bearer_token(text)
