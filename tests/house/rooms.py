"""Counts the rooms of the tree, the imports between them, and the size of each, for ``make house``.

A room is a package at the first level of ``relay``, ``kubelet`` or ``schemas``; the modules at the root of
one of these are a room too. An arrow is a pair of rooms of which one imports the other, anywhere in a module:
also in a function, under TYPE_CHECKING, and by ``import_module`` of a name that is written out. ``--json``
prints all of it, with names.
"""

import ast
import json
import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PRODUCT = ("relay", "kubelet", "schemas")
CORE = frozenset(
    f"relay.{name}"
    for name in (
        *("http", "auth", "mcp_api", "calls", "sessions", "fleet", "routing"),
        *("audit", "pki", "state", "settings", "limits", "observability"),
    )
)
"""What a call and a manifest pass through in the relay: docs/architecture.md."""


@dataclass
class Room:
    """What is counted of a room; code is what is neither blank, comment nor docstring."""

    files: int = 0
    lines: int = 0
    code: int = 0
    imports: set[str] = field(default_factory=set)


def room_of(name: str, root: Path = ROOT) -> str | None:
    """Return the room of a module, or of a name in one; None if it is not the product's."""
    program, *inside = name.split(".")
    if program not in PRODUCT:
        return None
    in_package = bool(inside) and (root / program / inside[0] / "__init__.py").is_file()
    return f"{program}.{inside[0]}" if in_package else program


def imported(tree: ast.Module, package: str) -> Iterator[str]:
    """Yield the dotted names that a module of ``package`` imports: modules, and names in them."""
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                yield from (name.name for name in names)
            case ast.ImportFrom(module=module, names=names, level=level):
                above = package.rsplit(".", level - 1)[0] if level else None
                base = ".".join(part for part in (above, module) if part)
                yield from (f"{base}.{name.name}" for name in names)
            case ast.Call(
                func=ast.Name(id="import_module") | ast.Attribute(attr="import_module"),
                args=[ast.Constant(value=str(name)), *_],
            ):
                yield name


def rooms(root: Path = ROOT) -> dict[str, Room]:
    """Return the rooms of the tree below ``root``."""
    found: dict[str, Room] = defaultdict(Room)
    for file in (file for program in PRODUCT for file in sorted((root / program).rglob("*.py"))):
        package = ".".join(file.parent.relative_to(root).parts)
        name = room_of(package if file.stem == "__init__" else f"{package}.{file.stem}", root)
        assert name is not None
        room, source = found[name], file.read_text("utf-8")
        tree = ast.parse(source)
        room.files += 1
        room.lines += source.count("\n")
        room.code += code_lines(source, tree)
        targets = {room_of(target, root) for target in imported(tree, package)}
        room.imports |= {target for target in targets if target is not None and target != name}
    return found


def code_lines(source: str, tree: ast.Module) -> int:
    """Return how many lines of ``source`` are neither blank, nor only a comment or a docstring."""
    texts = {
        number
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
        for number in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }
    stripped = enumerate(map(str.strip, source.split("\n")), 1)
    return sum(bool(line) and not line.startswith("#") and number not in texts for number, line in stripped)


def totals(found: dict[str, Room], root: Path = ROOT) -> dict[str, int]:
    """Return the figures of the whole tree."""
    documents = [*root.glob("*.md"), *(root / "docs").rglob("*.md")]
    return {
        "rooms": len(found),
        "arrows": sum(len(room.imports) for room in found.values()),
        "source files": sum(room.files for room in found.values()),
        "lines of the core": sum(found[name].lines for name in CORE),
        "source lines": sum(room.lines for room in found.values()),
        "lines of code": sum(room.code for room in found.values()),
        "test lines": sum(file.read_bytes().count(b"\n") for file in (root / "tests").rglob("*.py")),
        "words of documents": sum(len(file.read_text("utf-8").split()) for file in documents),
    }


def table(found: dict[str, Room]) -> Iterator[str]:
    """Yield the lines of the tables for people."""
    yield f"{'room':20} {'files':>6} {'lines':>7} {'code':>7} {'imports':>8} {'imported by':>12}"
    for name, room in sorted(found.items()):
        importers = sum(name in other.imports for other in found.values())
        size = f"{room.files:6} {room.lines:7} {room.code:7}"
        yield f"{name:20} {size} {len(room.imports):8} {importers:12}"
    yield ""
    yield from (f"{name:20} {value:6}" for name, value in totals(found).items())


def document(found: dict[str, Room]) -> dict[str, Any]:
    """Return all figures, for programs."""
    return {
        "totals": totals(found),
        "rooms": {
            name: asdict(room) | {"imports": sorted(room.imports)} for name, room in sorted(found.items())
        },
    }


if __name__ == "__main__":
    counted = rooms()
    print(json.dumps(document(counted), indent=2) if "--json" in sys.argv[1:] else "\n".join(table(counted)))
