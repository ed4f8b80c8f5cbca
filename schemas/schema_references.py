"""How much of an untrusted JSON Schema is applied to a value: whether that stays bounded.

Schemas that each refer to two others take time that doubles with every one of them. So references are counted
as often as they are applied, and resolved for that as a validator resolves them: as pointers, with escapes,
and as anchors. What would have a validator resolve one otherwise is refused, and so is a reference that leads
nowhere. How often the schema is applied is up to the value, which its ``Extent`` bounds.
Must not fetch or compile.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import unquote

from schemas.error_roots import PeerError

_REFERENCES: Final = ("$ref", "$dynamicRef", "$recursiveRef")
_ANCHORS: Final = ("$anchor", "$dynamicAnchor")
_DEFINITIONS: Final = frozenset({"$defs", "definitions"})
_MAX_CHAIN: Final = 64
_OBJECTS_FOR_A_REFERENCE: Final = 32
"""How many objects may be applied for each reference that may be: they take time as well."""
MAX_APPLICATIONS: Final = 20_000_000
"""How many objects a verdict may apply to all parts of a value together: a few seconds."""
MAX_EXPLAINED: Final = 10_000
"""How many where a fault is searched for. A validator collects all that it finds, in a kibibyte for each."""
_UNEVALUATED: Final = frozenset({"unevaluatedProperties", "unevaluatedItems"})
_TIMES_OF_UNEVALUATED: Final = 4
"""How often such a keyword has a validator apply what is beside it, at most; each within another, again."""
_INDEX: Final = re.compile(r"[0-9]{1,6}")
_DIALECT_WITH_PLAIN_ID: Final = "draft-04"
"""In which ``id`` names a schema, as ``$id`` does in later ones."""


class SchemaReferencesError(PeerError):
    """The references of a schema are refused; the text is a constant of ours."""


@dataclass(frozen=True, slots=True)
class Extent:
    """How much of a schema is applied to one part of a value.

    Attributes:
        objects: its objects, each as often as it is reached; those of a circle of references once.
        is_circular: whether references form a circle.
    """

    objects: int
    is_circular: bool

    def may_be_judged(self, value: object) -> bool:
        """Return whether ``value`` is small enough for a verdict.

        A validator keeps its verdicts on each part, so that it applies a circle once to each.
        """
        return not _has_more_parts(value, MAX_APPLICATIONS // self.objects)

    def may_be_explained(self, value: object) -> bool:
        """Return whether the first fault of ``value`` may be searched for: there no verdicts are kept."""
        return not self.is_circular and not _has_more_parts(value, MAX_EXPLAINED // self.objects)


def extent_of(schema: Mapping[str, Any], most: int) -> Extent:
    """Return how much of ``schema`` is applied, if it refers to nothing outside of it.

    Raises:
        SchemaReferencesError: it does, or it applies more than ``most`` references, or as many objects.
    """
    parts = list(_parts(schema))
    if not all(reference.startswith("#") for part in parts for reference in _references_of(part)):
        raise SchemaReferencesError("a reference leads out of the document")
    names = ("$id", "$schema", *(("id",) if _DIALECT_WITH_PLAIN_ID in str(schema.get("$schema")) else ()))
    if any(isinstance(part.get(name), str) for part in parts[1:] for name in names):
        # References in it are resolved within it, and not within the document.
        raise SchemaReferencesError("a schema within it has an identifier or a dialect of its own")
    count = _Count(schema, most)
    count.apply(schema, frozenset(), 1)
    return Extent(count.objects, count.is_circular)


class _Count:
    """Counts as a schema is applied.

    Attributes:
        objects: so far.
        is_circular: whether a reference has led to one above it.
    """

    def __init__(self, document: Mapping[str, Any], most: int) -> None:
        self._document = document
        self._references_left = most
        self._most_objects = most * _OBJECTS_FOR_A_REFERENCE
        self.objects = 0
        self.is_circular = False

    def apply(self, place: object, above: frozenset[str], times: int) -> None:
        """Count what applying ``place`` so many times applies, behind the references ``above`` it."""
        for part, times_of_part in _parts_applied(place, times):
            self.objects += times_of_part
            if self.objects > self._most_objects:
                raise SchemaReferencesError("too much of it is applied to one value")
            for reference in _references_of(part):
                self._references_left -= 1
                if self._references_left < 0 or len(above) >= _MAX_CHAIN:
                    raise SchemaReferencesError("its references refer to too many others")
                if reference in above:
                    self.is_circular = True
                else:
                    self.apply(self._target(reference), above | {reference}, times_of_part)

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


def _parts_applied(place: object, times: int) -> Iterator[tuple[Mapping[str, Any], int]]:
    """Yield every object within ``place``, and how often it is applied.

    Without definitions, which apply where they are referred to.
    """
    if isinstance(place, Mapping):
        place = {name: item for name, item in place.items() if name not in _DEFINITIONS}
    return _parts_times(place, times)


def _parts_times(place: object, times: int) -> Iterator[tuple[Mapping[str, Any], int]]:
    if isinstance(place, list):
        for item in place:
            yield from _parts_times(item, times)
    elif isinstance(place, Mapping):
        yield place, times
        within = times if _UNEVALUATED.isdisjoint(place) else times * _TIMES_OF_UNEVALUATED
        for item in place.values():
            yield from _parts_times(item, within)


def _has_more_parts(value: object, most: int) -> bool:
    """Return whether ``value`` has more than ``most`` parts: itself, and all within it."""
    count, waiting = 1, [value]
    while waiting and count <= most:
        part = waiting.pop()
        if isinstance(part, Mapping):
            count += len(part)
            waiting += part.values()
        elif isinstance(part, list):
            count += len(part)
            waiting += part
    return count > most
