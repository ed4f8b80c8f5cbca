"""A kind whose one verb is not idempotent: each run returns an id of its own, which shows a second one.

A run waits for as long as ``held_file`` of its message is there, and adds a line to it first.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.fakes.kind_package import KIND, KindPackage, handler_doing

__all__ = ["KIND", "held_file", "install", "installed", "tool"]

_TEXT = {"type": "string", "maxLength": 64, "pattern": "^[0-9a-f]+$"}
_HANDLER = """
    import asyncio, pathlib, secrets
    held = pathlib.Path({directory!r}) / arguments["message"]
    if held.exists():
        with held.open("a") as file:
            file.write("run\\n")
    while held.exists():
        await asyncio.sleep(0.01)
    return {{"node_id": self._node_id, "message": arguments["message"], "run": secrets.token_hex(16)}}
"""


def tool(node_id: str) -> str:
    return f"acmerb.{node_id}.relays.set"


def held_file(site: Path, message: str) -> Path:
    """Return the file that keeps runs with ``message`` waiting, where the package is below ``site``."""
    return site / "held" / message


def install(site: Path) -> None:
    """Write the package below ``site``, a directory of packages."""
    directory = held_file(site, "any").parent
    directory.mkdir(parents=True)
    package = KindPackage(handler=handler_doing(_HANDLER.format(directory=str(directory))))
    verb: dict[str, Any] = package.row["verbs"]["set"]
    verb |= {"title": "Run once", "idempotent": False, "verbatim": [], "foreign_texts": []}
    verb["description"] = "Return an id of this run."
    package.input |= {
        "required": ["message"],
        "properties": {"message": {**_TEXT, "description": "Returned."}},
    }
    package.output["required"] = ["node_id", "message", "run"]
    package.output["properties"] = {
        "node_id": package.output["properties"]["node_id"],
        "message": _TEXT,
        "run": _TEXT,
    }
    package.install(site)


@contextmanager
def installed(site: Path) -> Iterator[None]:
    """Have this process find the package below ``site`` until the end of the block."""
    sys.path.append(str(site))
    try:
        yield
    finally:
        sys.path.remove(str(site))
