"""The directory in which targets put the files that a parser reads by itself.

In memory where the system has such a directory: a run writes a million files. Must not be used by two targets
under one name.
"""

import tempfile
from functools import cache
from pathlib import Path
from typing import Final

from schemas.files import PRIVATE

_IN_MEMORY: Final = Path("/dev/shm")  # noqa: S108 - made anew below it, with a name that cannot be foreseen


@cache
def directory() -> Path:
    """Return the directory, made on first use; it is removed when the process ends."""
    parent = _IN_MEMORY if _IN_MEMORY.is_dir() else None
    return Path(_made(parent).name)


@cache
def _made(parent: Path | None) -> "tempfile.TemporaryDirectory[str]":
    return tempfile.TemporaryDirectory(prefix="edge-fuzz-", dir=parent)


def scratch(name: str, data: bytes) -> Path:
    """Return the file ``name`` with ``data`` as its content, which its owner alone can read."""
    path = directory() / name
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch(PRIVATE)
    path.write_bytes(data)
    return path
