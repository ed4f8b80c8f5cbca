"""The texts that a page of ``docs/`` shows: ``<!-- file: PATH -->`` or ``snippet`` is over each."""

import ast
import gc
import re
import struct
import zlib
from collections.abc import Mapping
from functools import cache
from pathlib import Path

_SHOWN = re.compile(r"(?ms)^<!-- file: (?P<path>[^\n,]+) -->\n```\w+\n(?P<text>.*?)^```$")
_SNIPPET = re.compile(r"(?ms)^<!-- snippet: ([\w.]+) -->\n```python\n(.*?)^```$")
_COMMENT = re.compile(r"(?m)^<!-- ")


def shown_files(page: str) -> dict[str, str]:
    """Return the texts of the files that ``page`` shows, by their paths.

    Raises:
        ValueError: a comment is over no block; a misspelt one would otherwise be passed over.
    """
    found = {match["path"]: match["text"] for match in _SHOWN.finditer(page)}
    if len(found) != len(_COMMENT.findall(page)):
        raise ValueError("a comment of the page is not above a block, or is misspelt")
    return found


def snippets(page: str) -> dict[str, str]:
    """Return the programs that ``page`` shows among other blocks, by their names."""
    return dict(_SNIPPET.findall(page))


# --- The smallest files that say what size an image has.


def png(width: int, height: int) -> bytes:
    """Return a PNG of that size: its header, and the end."""
    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + _chunk(b"IHDR", header) + _chunk(b"IEND", b"")


def jpeg(width: int, height: int) -> bytes:
    """Return the start of a JPEG of that size: an application segment and the frame header."""
    application = b"\xff\xe0" + struct.pack(">H", 16) + b"JFIF\0" + bytes(9)
    frame = b"\xff\xc0" + struct.pack(">HBHHB", 11, 8, height, width, 1) + b"\x01\x11\x00"
    return b"\xff\xd8" + application + frame + b"\xff\xd9"


def _chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


# --- The tests of a file by name, for the documents that name tests as evidence.


ROOT = Path(__file__).parent.parent.parent
_TEST = re.compile(r"^(?:async )?def (test_\w+)\(", re.MULTILINE)


@cache
def named_tests(file: str) -> frozenset[str]:
    """Return the names of the tests in ``file``, a path below the root; none if it does not exist."""
    path = ROOT / file
    return frozenset(_TEST.findall(path.read_text("utf-8"))) if path.is_file() else frozenset()


# --- The product's sources as syntax trees, for tests of what they say. Must not be changed by a test.


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
