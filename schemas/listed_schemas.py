"""The schemas of tools as models read them: the rules of the contract, with descriptions written for models.

The descriptions of the seeds' documents are for implementers: they take a model's context, and tell it what a
gateway must check. Must not change a rule: every keyword that validates stays as it is, and so does what is
served under the document's own id.
"""

from typing import Any

from schemas.kinds import Notes
from schemas.registry import SchemaRegistry

_ANNOTATIONS = frozenset({"$comment", "title", "description", "examples"})
_BY_NAME = frozenset({"properties", "patternProperties", "$defs", "dependentSchemas"})
_SCHEMAS = frozenset(
    {"items", "additionalProperties", "contains", "propertyNames", "not", "if", "then", "else"}
)
_LISTS = frozenset({"allOf", "anyOf", "oneOf", "prefixItems"})


def listed_schema(registry: SchemaRegistry, ref: str) -> dict[str, Any]:
    """Return the document ``ref`` as an entry of ``tools/list`` shows it.

    Without ``$id`` and ``$schema``: clients compile all tools' schemas into one validator, which refuses an
    id that it has seen, and some do not know the dialect's URI. ``_meta`` names the schema instead.

    Raises:
        KeyError: there is no such document.
    """
    document = {key: value for key, value in registry.document(ref).items() if key not in {"$id", "$schema"}}
    notes = registry.notes(ref)
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
