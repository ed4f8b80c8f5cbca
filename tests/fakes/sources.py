"""The product's sources as syntax trees, for tests of what they say. Must not be changed by a test."""

import ast
import gc
from collections.abc import Mapping
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent


@cache
def product_trees() -> Mapping[Path, ast.Module]:
    """Return the tree of each module of the product, by its path below the repository.

    Parsed once for all tests, and without the garbage collector, which takes more time than the parser: it
    looks at every node again and again.
    """
    files = [file for package in ("schemas", "kubelet", "relay") for file in (ROOT / package).rglob("*.py")]
    gc.disable()
    try:
        return {file.relative_to(ROOT): ast.parse(file.read_text("utf-8")) for file in files}
    finally:
        gc.enable()
