"""Wherever our sources start Python, the interpreter ignores modules in the working directory."""

import ast
import os
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
# The attack itself, which shows that it works where it is not prevented.
ATTACK = Path("tests/adversary/test_code_in_the_working_directory.py")


def sources_below(directory: Path) -> Iterator[Path]:
    """Yield our sources. Not by ``rglob``, which reads the thousands of directories of npm's packages too."""
    for place, inner, files in os.walk(directory):
        inner[:] = sorted(name for name in inner if name != "node_modules")
        yield from (Path(place, name).relative_to(ROOT) for name in sorted(files) if name.endswith(".py"))


SOURCES = [
    source
    for package in ("schemas", "kubelet", "relay", "bench", "tests")
    for source in sources_below(ROOT / package)
]
TEXTS = [
    path.relative_to(ROOT)
    for pattern in ("Makefile", ".ci/*", "*.md", "docs/**/*.md", "*/units/*")
    for path in sorted(ROOT.glob(pattern))
]
# Python with an option or a script; `python-` and `python3 or newer` are none.
STARTED = re.compile(r"""(?:^|[/"\s`@)])(?:python3?|\$\(PYTHON\)|\$python)"?\s+(-\S+|\S+\.py)""")


def is_interpreter(value: ast.expr | None) -> bool:
    match value:
        case ast.Attribute(value=ast.Name(id="sys"), attr="executable"):
            return True
        case _:
            return False


def is_safe(argument: ast.expr) -> bool:
    """Return whether the argument after the interpreter is ``-P``, or a list that begins with it."""
    match argument:
        case ast.Starred(value=value):
            return is_safe(value)
        case ast.Tuple(elts=[first, *_]) | ast.List(elts=[first, *_]):
            return is_safe(first)
        case ast.Constant(value="-P"):
            return True
        case _:
            return False


def unsafe_starts(tree: ast.AST) -> Iterator[int]:
    """Yield the lines where ``sys.executable`` is followed by something else than ``-P``."""
    for node in ast.walk(tree):
        match node:
            case ast.List(elts=parts) | ast.Tuple(elts=parts) | ast.Call(args=parts) if len(parts) > 1:
                for first, second in pairwise(parts):
                    if is_interpreter(first) and not is_safe(second):
                        yield first.lineno
            case ast.Call(keywords=[*named]):
                told = {each.arg: each.value for each in named}
                if any(map(is_interpreter, told.values())):
                    arguments = told.get("args")
                    if not isinstance(arguments, ast.List) or ast.unparse(arguments.elts[0]) != "'-P'":
                        yield node.lineno


@pytest.mark.parametrize(
    "code", ["[sys.executable, '-m', 'x']", "f(sys.executable, *y)", "f(a=sys.executable)"]
)
def test_a_start_without_the_option_is_found(code: str) -> None:
    assert list(unsafe_starts(ast.parse(code))) == [1]


@pytest.mark.parametrize("code", ["[sys.executable, '-P', 'x']", "f(sys.executable, *('-P', 'x'), *y)"])
def test_a_start_with_it_is_not(code: str) -> None:
    assert list(unsafe_starts(ast.parse(code))) == []


def test_no_source_starts_python_without_it() -> None:
    found = [
        f"{path}:{line}"
        for path in SOURCES
        # Most have no such word, and to parse them all takes seconds.
        if path != ATTACK and "sys.executable" in (text := (ROOT / path).read_text("utf-8"))
        for line in unsafe_starts(ast.parse(text))
    ]
    assert found == []


@pytest.mark.skipif(not (ROOT / "Makefile").is_file(), reason="this runs beside an installed wheel")
def test_no_script_and_no_page_does() -> None:
    found = [
        f"{path}: {started.group(0)}"
        for path in TEXTS
        for started in STARTED.finditer((ROOT / path).read_text("utf-8"))
        if started.group(1) != "-P"
    ]
    assert found == []
