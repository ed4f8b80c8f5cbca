"""The schemas of tools as models read them: the rules of the contract, with descriptions written for models.

The descriptions of the seeds' documents are for implementers: they take a model's context, and tell it what a
gateway must check. Must not change a rule: every keyword that validates stays as it is, and so does what is
served under the document's own id.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from schemas.registry import SchemaRegistry

_ANNOTATIONS = frozenset({"$comment", "title", "description", "examples"})
_BY_NAME = frozenset({"properties", "patternProperties", "$defs", "dependentSchemas"})
_SCHEMAS = frozenset(
    {"items", "additionalProperties", "contains", "propertyNames", "not", "if", "then", "else"}
)
_LISTS = frozenset({"allOf", "anyOf", "oneOf", "prefixItems"})

Notes = Mapping[str, str]
"""Descriptions by the path of member names, as ``/disk/*/mount``; ``*`` is what a list contains."""

NOTES: Mapping[str, Notes] = MappingProxyType(
    {
        "system.echo.invoke.input@1.0.0": {"/message": "Printable ASCII."},
        "system.echo.invoke.output@1.0.0": {
            "/message": "The message, unchanged.",
            "/received_at_ms": "When the node received it, by the node's clock: ms since 1970, UTC.",
            "/node_id": "The node that answered.",
        },
        # The members' names, units and the parts to choose from say it.
        "system.metrics.snapshot.input@1.0.0": {},
        "system.metrics.subscribe.input@1.0.0": {},
    }
)
"""By the reference of a document of the seeds. Other documents have descriptions for models already."""


def listed_schema(registry: SchemaRegistry, ref: str) -> dict[str, Any]:
    """Return the document ``ref`` as an entry of ``tools/list`` shows it.

    Without ``$id`` and ``$schema``: clients compile all tools' schemas into one validator, which refuses an
    id that it has seen, and some do not know the dialect's URI. ``_meta`` names the schema instead.

    Raises:
        KeyError: there is no such document.
    """
    document = {key: value for key, value in registry.document(ref).items() if key not in {"$id", "$schema"}}
    notes = NOTES.get(ref)
    return document if notes is None else with_notes(document, notes)


def with_notes(document: Any, notes: Notes, path: str = "") -> Any:
    """Return ``document`` with ``notes`` as its only descriptions. ``default`` stays."""
    if not isinstance(document, dict):
        return document
    shown: dict[str, Any] = {}
    for key, value in document.items():
        if key in _BY_NAME:
            shown[key] = {name: with_notes(each, notes, f"{path}/{name}") for name, each in value.items()}
        elif key in _SCHEMAS:
            shown[key] = with_notes(value, notes, f"{path}/*")
        elif key in _LISTS:
            shown[key] = [with_notes(each, notes, path) for each in value]
        elif key not in _ANNOTATIONS:
            shown[key] = value
    if path in notes:
        shown["description"] = notes[path]
    return shown
