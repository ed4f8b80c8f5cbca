"""The clauses of the specifications and the tests that hold them, checked both ways."""

import ast
import tomllib
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
REQUIREMENTS: list[dict[str, Any]] = tomllib.loads((ROOT / "tests" / "requirements.toml").read_text("utf-8"))[
    "requirement"
]


def names_in(path: Path) -> set[str]:
    tree = ast.parse(path.read_text("utf-8"))
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    return {
        node.name for node in ast.walk(tree) if isinstance(node, functions) and node.name.startswith("test_")
    }


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
        assert name in names_in(ROOT / path), f"{test} does not exist"


def test_no_clause_stands_twice() -> None:
    twice = [name for name, count in Counter(item["id"] for item in REQUIREMENTS).items() if count > 1]
    assert twice == []
