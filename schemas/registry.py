"""The schema registry: every document by its reference, and the compiled validators.

A reference is what stands behind ``mcp://schemas/``: ``{kind}@{semver}``. Look-ups are dictionary
look-ups, never paths. Must not hand out anything that its taker could change for others.
"""

import json
from collections.abc import Mapping
from hashlib import sha256
from importlib.resources import files
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

import jsonschema_rs

from schemas.canonical import jcs
from schemas.text import printable

SCHEME = "mcp://schemas/"


class ViolationError(ValueError):
    """A value does not fit its schema. ``where`` and ``rule`` are printable and hold no value of it."""

    def __init__(self, where: str, rule: str) -> None:
        super().__init__(where, rule)
        self.where = where
        self.rule = rule

    def __str__(self) -> str:
        return f"{self.where} violates {self.rule}"


class Validator:
    """One compiled document."""

    def __init__(self, document: dict[str, Any], resources: jsonschema_rs.Registry) -> None:
        self._compiled = jsonschema_rs.Draft202012Validator(document, registry=resources)

    def is_valid(self, value: object) -> bool:
        """Tell whether ``value`` fits. What cannot even be read as text, a lone surrogate, fits nothing."""
        try:
            return self._compiled.is_valid(value)
        except ValueError:
            return False

    def check(self, value: object) -> None:
        """Return when ``value`` fits.

        Raises:
            ViolationError: it does not; names the first rule that it breaks and where.
        """
        try:
            error = next(self._compiled.iter_errors(value), None)
        except ValueError:
            raise ViolationError("/", "text") from None
        if error is None:
            return
        where = "/" + "/".join(str(part) for part in error.instance_path)
        rule = str(error.schema_path[-1]) if error.schema_path else "schema"
        raise ViolationError(printable(where, 128), printable(rule, 64))


class Source(Protocol):
    """Where documents are read from: a directory or a package's resources."""

    def iterdir(self) -> Any: ...  # noqa: D102 - Path and Traversable differ in the item type


class SchemaRegistry:
    """The documents below ``schema_root`` (default: those that ship with this package).

    Raises:
        ValueError: a document is not JSON, has no ``$id`` of ours, or one that another has.
    """

    def __init__(self, schema_root: Path | None = None) -> None:
        source: Source = schema_root or files("schemas").joinpath("documents")
        documents: dict[str, dict[str, Any]] = {}
        for entry in sorted(source.iterdir(), key=lambda item: str(item.name)):
            if not entry.name.endswith(".json"):
                continue
            document = json.loads(entry.read_text(encoding="utf-8"))
            ref = entry.name.removesuffix(".json")
            # A file's name is unique in its directory, so an id that must equal it is unique too.
            if not isinstance(document, dict) or document.get("$id") != SCHEME + ref:
                raise ValueError(f"{entry.name}: its $id must be {SCHEME}{ref}")
            documents[ref] = document
        self._documents = documents
        self._bytes = MappingProxyType({ref: jcs(document) for ref, document in documents.items()})
        self._resources = jsonschema_rs.Registry([(SCHEME + ref, doc) for ref, doc in documents.items()])
        self._compiled: dict[str, Validator] = {}

    @property
    def documents(self) -> Mapping[str, bytes]:
        """Every document's canonical bytes by reference."""
        return self._bytes

    def document(self, ref: str) -> dict[str, Any]:
        """Return a copy of the document ``ref``, the taker's own.

        Raises:
            KeyError: there is none.
        """
        copy: dict[str, Any] = json.loads(self._bytes[ref])
        return copy

    def load(self, ref: str) -> Validator:
        """Return the compiled validator of the document ``ref``.

        Compiled once per content: the cache is keyed by the SHA-256 of the canonical bytes.

        Raises:
            KeyError: there is no such document.
        """
        key = sha256(self._bytes[ref]).hexdigest()
        if (known := self._compiled.get(key)) is not None:
            return known
        validator = self._compiled[key] = Validator(self._documents[ref], self._resources)
        return validator
