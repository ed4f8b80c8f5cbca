"""The documents that ship, but for what clamps the shipped kinds to one safety class."""

import json
from pathlib import Path

from schemas.registry import SchemaRegistry
from tests.fakes.documents import write_contract


def unclamped_registry(directory: Path) -> SchemaRegistry:
    """Return a registry below ``directory`` by which any capability may have any safety class."""
    documents = directory / "documents"
    write_contract(documents)
    for path in documents.glob("manifest@*.json"):
        manifest = json.loads(path.read_text("utf-8"))
        del manifest["$defs"]["Capability"]["allOf"]
        path.write_text(json.dumps(manifest), "utf-8")
    return SchemaRegistry(documents)
