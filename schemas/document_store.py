"""The documents of a contract: read when the process starts, and each parsed when it is first asked for.

A process needs a third of them. Those that nothing asks for are kept as they were read, so that an update of
the package does not change them below a running process. Must not compile.
"""

import json
from collections.abc import Container, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from schemas.canonical import jcs
from schemas.text import printable

SCHEME = "mcp://schemas/"

# What makes a document depend on another; a value of one of them that is no text is a property of that name.
_REFERENCES = ("$ref", "$dynamicRef")


class DocumentStore(Mapping[str, bytes]):
    """The canonical bytes of the documents in ``directories``, and of those ``brought``, by reference.

    Kept as bytes: parsed, all of them take a mebibyte of every board.

    Raises:
        ValueError: on taking one that is not JSON, has no ``$id`` of its name, or refers to what is none of
            these documents.
    """

    def __init__(self, directories: Iterable[Path], brought: Mapping[str, Mapping[str, Any]]) -> None:
        self._bytes = {file.name.removesuffix(".json"): file.read_bytes() for file in _files(directories)}
        self._bytes |= {ref: jcs(document) for ref, document in brought.items()}
        self._checked: set[str] = set()

    def __getitem__(self, ref: str) -> bytes:
        # Two threads that ask at once get equal bytes: canonical bytes stay as they are.
        if ref not in self._checked:
            self._bytes[ref] = jcs(_parsed(ref, self._bytes[ref], self._bytes))
            self._checked.add(ref)
        return self._bytes[ref]

    def __iter__(self) -> Iterator[str]:
        return iter(self._bytes)

    def __len__(self) -> int:
        return len(self._bytes)


def referred(ref: str, document: object) -> set[str]:
    """Return the documents that the ``document`` of ``ref`` refers to, itself if by a fragment alone."""
    return {text.removeprefix(SCHEME).partition("#")[0] or ref for text in _references(document)}


def _files(directories: Iterable[Path]) -> list[Path]:
    files = (entry for directory in directories for entry in directory.iterdir() if entry.suffix == ".json")
    return sorted(files, key=lambda file: file.name)


def _parsed(ref: str, text: bytes, documents: Container[str]) -> dict[str, Any]:
    document = json.loads(text)
    # A file's name is unique in its directory, so an id that must equal it is unique too.
    if not isinstance(document, dict) or document.get("$id") != SCHEME + ref:
        raise ValueError(f"{ref}.json: its $id must be {SCHEME}{ref}")
    for target in _references(document):
        other, _, _ = target.removeprefix(SCHEME).partition("#")
        # A relative reference would have to be resolved as a URL to know what it refers to.
        if other and (not target.startswith(SCHEME) or other not in documents):
            named = printable(target)
            raise ValueError(f"{ref}.json: refers to {named}, which is no document here by its $id")
    return document


def _references(schema: object) -> Iterator[str]:
    if isinstance(schema, list):
        for item in schema:
            yield from _references(item)
    elif isinstance(schema, dict):
        for name, item in schema.items():
            if name in _REFERENCES and isinstance(item, str):
                yield item
            else:
                yield from _references(item)
