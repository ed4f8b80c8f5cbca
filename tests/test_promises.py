"""Every promise of ``docs/promises.md`` names tests that exist."""

import re

import pytest

from tests.fakes.guide import ROOT, named_tests

DOCUMENT = (ROOT / "docs" / "promises.md").read_text("utf-8")
TEST = re.compile(r"`(tests/[\w/]+\.py)::(test_\w+)`")
ROW = re.compile(r"^\| (?!Promised|-)(.+?) \| (.+) \|$", re.MULTILINE)
PROMISES = ROW.findall(DOCUMENT)


def missing_tests(cell: str) -> set[str]:
    """Return the tests that ``cell`` names and that are not in their file."""
    return {f"{file}::{name}" for file, name in TEST.findall(cell) if name not in named_tests(file)}


@pytest.mark.parametrize(("promise", "cell"), PROMISES, ids=[promise for promise, _ in PROMISES])
def test_a_promise_is_shown_by_tests_that_exist(promise: str, cell: str) -> None:
    assert TEST.search(cell), promise
    assert missing_tests(cell) == set()


def test_a_test_that_does_not_exist_is_found() -> None:
    for file, name in (("tests/test_promises.py", "test_of_nothing"), ("tests/test_of_nothing.py", "test_x")):
        assert missing_tests(f"`{file}::{name}`") == {f"{file}::{name}"}
