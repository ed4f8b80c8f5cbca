"""The references within a JSON Schema that a stranger wrote: whether applying them stays bounded.

Schemas that each refer to two others take time that doubles with every one of them. So references are counted
as often as they are applied, and resolved for that as a validator resolves them: as pointers, with escapes,
and as anchors. What would have a validator resolve one otherwise is refused, and so is a reference that leads
nowhere. A circle is counted once: how often it is applied is up to the value. Must not fetch or compile.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any, Final
from urllib.parse import unquote

from schemas.error_roots import PeerError

_REFERENCES: Final = ("$ref", "$dynamicRef", "$recursiveRef")
_ANCHORS: Final = ("$anchor", "$dynamicAnchor")
_DEFINITIONS: Final = frozenset({"$defs", "definitions"})
_MAX_CHAIN: Final = 64
_OBJECTS_FOR_A_REFERENCE: Final = 32
"""How many objects may be applied for each reference that may be: they take time as well."""
_INDEX: Final = re.compile(r"[0-9]{1,6}")
_DIALECT_WITH_PLAIN_ID: Final = "draft-04"
"""In which ``id`` names a schema, as ``$id`` does in later ones."""


class SchemaReferencesError(PeerError):
    """The references of a schema are refused; the text is a constant of ours."""


def check_references(schema: Mapping[str, Any], most: int) -> None:
    """Return if ``schema`` refers to nothing outside of it, and applies at most ``most`` references.

    Raises:
        SchemaReferencesError: it does not.
    """
    parts = list(_parts(schema))
    if not all(reference.startswith("#") for part in parts for reference in _references_of(part)):
        raise SchemaReferencesError("a reference leads out of the document")
    names = ("$id", "$schema", *(("id",) if _DIALECT_WITH_PLAIN_ID in str(schema.get("$schema")) else ()))
    if any(isinstance(part.get(name), str) for part in parts[1:] for name in names):
        # References in it are resolved within it, and not within the document.
        raise SchemaReferencesError("a schema within it has an identifier or a dialect of its own")
    _Count(schema, most).apply(schema, frozenset())


class _Count:
    """Counts down as a schema is applied."""

    def __init__(self, document: Mapping[str, Any], most: int) -> None:
        self._document = document
        self._references = most
        self._objects = most * _OBJECTS_FOR_A_REFERENCE

    def apply(self, place: object, above: frozenset[str]) -> None:
        """Count what applying ``place`` applies, behind the references ``above`` it."""
        for part in _parts_applied(place):
            self._objects -= 1
            for reference in _references_of(part):
                self._references -= 1
                if min(self._references, self._objects) < 0 or len(above) >= _MAX_CHAIN:
                    raise SchemaReferencesError("its references refer to too many others")
                if reference not in above:
                    self.apply(self._target(reference), above | {reference})

    def _target(self, reference: str) -> object:
        """Return what ``reference`` leads to: of an anchor, all that have its name."""
        fragment = unquote(reference.removeprefix("#"))
        if not fragment.startswith("/") and fragment:
            named = [part for part in _parts(self._document) if fragment in map(part.get, _ANCHORS)]
            if not named:
                raise SchemaReferencesError("a reference leads nowhere")
            return named
        place: Any = self._document
        for part in fragment.split("/")[1:]:
            place = _member(place, part.replace("~1", "/").replace("~0", "~"))
        return place


def _member(place: object, name: str) -> Any:
    if isinstance(place, Mapping) and name in place:
        return place[name]
    if isinstance(place, list) and _INDEX.fullmatch(name) and int(name) < len(place):
        return place[int(name)]
    raise SchemaReferencesError("a reference leads nowhere")


def _references_of(part: Mapping[str, Any]) -> Iterator[str]:
    return (part[name] for name in _REFERENCES if isinstance(part.get(name), str))


def _parts(schema: object) -> Iterator[Mapping[str, Any]]:
    """Yield every object within ``schema``, itself first."""
    if isinstance(schema, list):
        for item in schema:
            yield from _parts(item)
    elif isinstance(schema, Mapping):
        yield schema
        for item in schema.values():
            yield from _parts(item)


def _parts_applied(place: object) -> Iterator[Mapping[str, Any]]:
    """Yield every object within ``place``, without definitions: they apply where they are referred to."""
    if isinstance(place, Mapping):
        place = {name: item for name, item in place.items() if name not in _DEFINITIONS}
    return _parts(place)
