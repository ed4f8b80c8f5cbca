"""A package that brings a kind, as an installer leaves it: its files, and the metadata that records them.

Importing any module of it leaves a line in ``imported``: so a test sees who runs its code.
"""

import base64
import hashlib
import json
import zipfile
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from textwrap import dedent, indent
from typing import Any

KIND = "acme.relay_board"
INPUT_REF = f"{KIND}.set.input@1.0.0"
OUTPUT_REF = f"{KIND}.set.output@1.0.0"

ROW: Mapping[str, Any] = {
    "kind": KIND,
    "kind_short": "acmerb",
    "safety_class": "read_only",
    "schema_ref": f"mcp://schemas/{INPUT_REF}",
    "limits": {"rate_limit_rps": 10, "deadline_ms_default": 2000},
    "verbs": {
        "set": {
            "input": INPUT_REF,
            "output": OUTPUT_REF,
            "title": "Switch a relay",
            "description": "Switch one relay of a relay board on or off.",
            "idempotent": True,
            "verbatim": ["on"],
            "foreign_texts": [["label"]],
        }
    },
}
INPUT: Mapping[str, Any] = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "$id": f"mcp://schemas/{INPUT_REF}",
    "type": "object",
    "additionalProperties": False,
    "required": ["on"],
    "properties": {"on": {"type": "boolean", "description": "Whether current flows."}},
}
OUTPUT: Mapping[str, Any] = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "$id": f"mcp://schemas/{OUTPUT_REF}",
    "type": "object",
    "additionalProperties": False,
    "required": ["node_id", "on"],
    "properties": {
        "node_id": {"type": "string", "maxLength": 26, "pattern": "^[0-9a-hjkmnp-tv-z]{26}$"},
        "on": {"type": "boolean"},
        "label": {"type": "string", "maxLength": 64, "pattern": r"^[\x20-\x7E]*$"},
    },
}
_HANDLER = """
from kubelet.handlers.base import Handler

class RelayBoard(Handler):
    def __init__(self, node_id, now_ms):
        self._node_id = node_id

    @property
    def capability(self):
        return {
            "cap_id": "relays",
            "kind": "acme.relay_board",
            "schema_ref": "mcp://schemas/acme.relay_board.set.input@1.0.0",
            "verbs": ["set"],
            "safety_class": "read_only",
            "constraints": {"rate_limit_rps": 10, "deadline_ms_default": 2000},
        }

    async def invoke(self, verb, arguments):
"""


def handler_doing(invoke: str) -> str:
    """Return the source of a handler: ``invoke`` are the lines of that method."""
    return _HANDLER + indent(dedent(invoke), " " * 8)


HANDLER = handler_doing("""
    if not arguments["on"]:
        raise RuntimeError("the relay is stuck")
    return {"node_id": self._node_id, "on": True, "label": "pump 1"}
""")
_MARK = "with open({path!r}, 'a') as file:\n    file.write(__name__ + '\\n')\n"


def _copy(document: Mapping[str, Any]) -> dict[str, Any]:
    return deepcopy(dict(document))


@dataclass
class KindPackage:
    """What the package consists of; a test changes it before ``install``."""

    row: dict[str, Any] = field(default_factory=lambda: _copy(ROW))
    input: dict[str, Any] = field(default_factory=lambda: _copy(INPUT))
    output: dict[str, Any] = field(default_factory=lambda: _copy(OUTPUT))
    handler: str = HANDLER
    entry_point: str = "acme_relay_board.handler:RelayBoard"
    distribution: str = "acme_relay_board"

    def install(self, site: Path) -> Path:
        """Write it below ``site`` and return the directory of its data."""
        package = site / "acme_relay_board"
        mark = _MARK.format(path=str(imported_file(site)))
        files = {
            package / "__init__.py": mark,
            package / "handler.py": mark + self.handler,
            package / "kind.json": json.dumps(self.row),
            package / "documents" / f"{INPUT_REF}.json": json.dumps(self.input),
            package / "documents" / f"{OUTPUT_REF}.json": json.dumps(self.output),
        }
        info = site / f"{self.distribution}-1.0.dist-info"
        record = "".join(f"{file.relative_to(site)},,\n" for file in files)
        files[info / "METADATA"] = f"Metadata-Version: 2.1\nName: {self.distribution}\nVersion: 1.0\n"
        files[info / "RECORD"] = record
        files[info / "entry_points.txt"] = f"[edge_kubelet.kinds]\n{KIND} = {self.entry_point}\n"
        for file, text in files.items():
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, "utf-8")
        return package


def imported_file(site: Path) -> Path:
    """Return the file that names the modules that were imported from ``site``."""
    return site / "imported"


def imported(site: Path) -> list[str]:
    """Return the names of the modules that were imported from ``site``."""
    file = imported_file(site)
    return file.read_text("utf-8").split() if file.exists() else []


def wheel(
    directory: Path,
    name: str = "acme_relay_board",
    files: Mapping[str, str] | None = None,
    needs: str = "",
    package: KindPackage | None = None,
) -> Path:
    """Write the wheel of ``files``, by default those of ``package``, and return it."""
    if files is None:
        site = directory / "site"
        (package or KindPackage()).install(site)
        files = {
            str(file.relative_to(site)): file.read_text("utf-8").replace(
                str(imported_file(site)), "/dev/null"
            )
            for file in site.rglob("*")
            if file.is_file() and file.name not in {"RECORD", "METADATA"}
        }
    info = f"{name}-1.0.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n{needs}"
    whole = {**files, f"{info}/METADATA": metadata, f"{info}/WHEEL": "Wheel-Version: 1.0\n"}
    hashes = {path: hashlib.sha256(text.encode()).digest() for path, text in whole.items()}
    rows = [
        f"{path},sha256={base64.urlsafe_b64encode(digest).rstrip(b'=').decode()},"
        for path, digest in hashes.items()
    ]
    whole[f"{info}/RECORD"] = "\n".join([*rows, f"{info}/RECORD,,"]) + "\n"
    file = directory / f"{name}-1.0-py3-none-any.whl"
    with zipfile.ZipFile(file, "w") as archive:
        for path, text in whole.items():
            archive.writestr(path, text)
    file.chmod(0o644)
    return file
