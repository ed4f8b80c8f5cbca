"""The clauses of the specifications and the tests that hold them, checked both ways."""

import ast
import tomllib
from collections import Counter
from functools import cache
from typing import Any

import pytest

from tests.fakes.guide import ROOT

REQUIREMENTS: list[dict[str, Any]] = tomllib.loads((ROOT / "tests" / "requirements.toml").read_text("utf-8"))[
    "requirement"
]


@cache
def held() -> Counter[str]:
    """Return how many tests hold each clause."""
    texts = [file.read_text("utf-8") for file in (ROOT / "tests").rglob("test_*.py")]
    return Counter(
        ast.literal_eval(clause)
        for text in texts
        if ".holds(" in text
        for test in ast.walk(ast.parse(text))
        if isinstance(test, ast.FunctionDef | ast.AsyncFunctionDef) and test.name.startswith("test_")
        for mark in test.decorator_list
        if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "pytest.mark.holds"
        for clause in mark.args
    )


@pytest.mark.parametrize("requirement", REQUIREMENTS, ids=lambda requirement: requirement["id"])
def test_a_clause_is_held_by_a_test_or_says_why_not(requirement: dict[str, Any]) -> None:
    assert set(requirement) - {"deferred", "decision"} == {"id", "clause", "text"}
    if "decision" in requirement:
        assert list((ROOT / "docs" / "decisions").glob(f"{requirement['decision']}-*.md"))
    assert (requirement["id"] in held()) != ("deferred" in requirement)
    assert "deferred" not in requirement or len(requirement["deferred"].split()) > 5


def test_what_a_test_holds_is_a_clause_and_no_clause_stands_twice() -> None:
    clauses = Counter(requirement["id"] for requirement in REQUIREMENTS)
    assert set(held()) <= set(clauses)
    assert max(clauses.values()) == 1
