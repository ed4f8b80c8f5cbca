"""The digests of the schema documents of all releases: SHA-256 of what a relay serves.

A document that is listed never changes again; one that is not may change until a release has it. A release
sets its version in ``pyproject.toml``, and adds its documents to ``published.json`` by ``python -P -m
tests.house.published``, which refuses what was changed. Must not replace a digest.
"""

import json
import sys
import tomllib
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path

from schemas.registry import SchemaRegistry

ROOT = Path(__file__).parents[2]
LIST = Path(__file__).with_suffix(".json")


def digests(documents: Mapping[str, bytes]) -> dict[str, str]:
    """Return the digest of each of ``documents``, by reference."""
    return {ref: sha256(document).hexdigest() for ref, document in sorted(documents.items())}


def listed() -> dict[str, dict[str, str]]:
    """Return the digests by reference, by the version that was the first to have the document."""
    versions: dict[str, dict[str, str]] = json.loads(LIST.read_text("utf-8"))
    return versions


def published() -> dict[str, str]:
    """Return the digest of every published document, by reference."""
    return {ref: digest for documents in listed().values() for ref, digest in documents.items()}


def version() -> str:
    """Return the version of the tree."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    return str(project["version"])


def main() -> int:
    """Add the documents that are new in this version, and return the status of the process."""
    present, before = digests(SchemaRegistry().documents), published()
    if changed := [ref for ref, digest in before.items() if present.get(ref) != digest]:
        print(f"published, and changed or removed since: {', '.join(changed)}", file=sys.stderr)
        return 1
    added = {ref: digest for ref, digest in present.items() if ref not in before}
    versions = listed()
    versions[version()] = versions.get(version(), {}) | added
    LIST.write_text(json.dumps(versions, indent=2) + "\n", "utf-8")
    print(f"added to {version()}: {', '.join(added) or 'nothing'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
