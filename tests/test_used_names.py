"""Every name that the product defines is one that the product uses: what only tests use is dead code."""

import ast
from collections import Counter
from collections.abc import Iterator

from tests.fakes.guide import product_trees

CALLED_BY_OTHERS = {
    "readable": "by io",
    "readinto": "by io",
    "process_redirect": "by websockets",
    "describe": "by prometheus_client",
    "_unset_keepalive_if_required": "by uvicorn",
    "capture_signals": "by uvicorn",
    "main_loop": "by uvicorn",
    "handle_websocket_upgrade": "by uvicorn",
    "on_header": "by uvicorn",
    "get_tokens": "by the MCP SDK",
    "set_tokens": "by the MCP SDK",
    "get_client_info": "by the MCP SDK",
    "set_client_info": "by the MCP SDK",
    "format_commands": "by typer",
    "load_tool_io": "by other programs: the contract names it",
}

DECORATED_FOR = (".command", ".callback", "overload", "_check")
"""Decorators by which a library, or a table that they add it to, calls the function."""


def is_called_by_a_library(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> bool:
    return any(word in ast.unparse(decorator) for decorator in node.decorator_list for word in DECORATED_FOR)


def defined_in(body: list[ast.stmt]) -> Iterator[str]:
    """Yield the names that a module, and the methods that its classes, define."""
    for node in body:
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                if not is_called_by_a_library(node):
                    yield node.name
            case ast.Assign(targets=targets):
                yield from (target.id for target in targets if isinstance(target, ast.Name))
            case ast.AnnAssign(target=ast.Name(id=name)):
                yield name
        if isinstance(node, ast.ClassDef):
            methods = [item for item in node.body if isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef)]
            yield from defined_in([*methods])


def used_in(tree: ast.Module) -> Iterator[str]:
    """Yield the names that are read; not those that are only imported."""
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name, ctx=ast.Load()) | ast.Attribute(attr=name, ctx=ast.Load()):
                yield name
            case ast.Constant(value=str(text)) if text.isidentifier():
                yield text  # an annotation in quotes, or what `getattr` asks for


def test_the_product_uses_every_name_that_it_defines() -> None:
    trees = product_trees().values()
    used = Counter(name for tree in trees for name in used_in(tree))
    defined = Counter(name for tree in trees for name in defined_in(tree.body))
    assert sum(defined.values()) > 5000
    unused = {name for name in defined if not used[name] and not name.startswith("__")}
    assert unused == set(CALLED_BY_OTHERS)
