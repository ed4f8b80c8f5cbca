"""The clauses of the specifications and the tests that hold them, checked both ways."""

import tomllib
from collections import Counter
from typing import Any

import pytest

from tests.fakes.named_tests import ROOT, named_tests

REQUIREMENTS: list[dict[str, Any]] = tomllib.loads((ROOT / "tests" / "requirements.toml").read_text("utf-8"))[
    "requirement"
]


@pytest.mark.parametrize("requirement", REQUIREMENTS, ids=lambda requirement: requirement["id"])
def test_a_clause_is_held_by_tests_that_exist_or_says_why_not(requirement: dict[str, Any]) -> None:
    assert set(requirement) - {"tests", "deferred"} == {"id", "clause", "text"}
    assert ("tests" in requirement) != ("deferred" in requirement)
    if "deferred" in requirement:
        assert len(requirement["deferred"].split()) > 5
        return
    assert requirement["tests"]
    for test in requirement["tests"]:
        path, _, name = test.partition("::")
        assert name in named_tests(path), f"{test} does not exist"


def test_no_clause_stands_twice() -> None:
    twice = [name for name, count in Counter(item["id"] for item in REQUIREMENTS).items() if count > 1]
    assert twice == []
