"""How much of an untrusted JSON Schema is applied to a value: whether that stays bounded.

Schemas that each refer to two others take time that doubles with every one of them. So references are counted
as often as they are applied, and resolved for that as a validator resolves them: as pointers, with escapes,
and as anchors. What would have a validator resolve one otherwise is refused, and so is a reference that leads
nowhere. How often the schema is applied is up to the value, which its ``Extent`` bounds.
Must not fetch or compile.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
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
MAX_PATTERN_SIZE: Final = 1 << 16
"""The bytes of a compiled pattern, which bound what one takes for each byte of a text: 0.4 microseconds."""
_PATTERNS_OF_FULL_SIZE: Final = 64
MAX_PATTERN_BYTES: Final = 2_000_000
"""How many bytes all patterns together may be applied to, of that size and without backtracking: a second."""
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
        patterns: the patterns in them, counted as they are.
        is_circular: whether references form a circle.
    """

    objects: int
    patterns: int
    is_circular: bool

    def may_be_judged(self, value: object, most: int = MAX_APPLICATIONS) -> bool:
        """Return whether ``value`` is small enough for a verdict that applies at most so many objects.

        A validator keeps its verdicts on each part, so that it applies a circle once to each.
        """
        return not _has_more_parts(value, most // self.objects)

    def size_for_a_pattern(self, most: int = MAX_PATTERN_SIZE) -> int:
        """Return how many bytes each compiled pattern may have: together no more than 64 of ``most``."""
        return most * _PATTERNS_OF_FULL_SIZE // max(_PATTERNS_OF_FULL_SIZE, self.patterns)

    def may_be_matched(self, size: int) -> bool:
        """Return whether a value of ``size`` bytes as JSON is small enough for the patterns."""
        return self.patterns * size <= MAX_PATTERN_BYTES

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
    count = _Count(schema, parts, most)
    count.apply(count.applied(schema), frozenset(), 1)
    return Extent(count.objects, count.patterns, count.is_circular)


@dataclass(frozen=True, slots=True)
class _Applied:
    """What one application of a place applies, before any reference is followed.

    Attributes:
        objects: how many, each as often as it is applied.
        patterns: those in them, counted as they are.
        references: each with how often it is applied.
    """

    objects: int
    patterns: int
    references: tuple[tuple[str, int], ...]


_NOTHING: Final = _Applied(0, 0, ())


class _Count:
    """Counts as a schema is applied.

    A place is walked through, and a reference resolved, once, however often it is applied: the work grows
    with the size of the document and with ``most``, and not with their product.

    Attributes:
        objects, patterns: so far.
        is_circular: whether a reference has led to one above it.
    """

    def __init__(self, document: Mapping[str, Any], parts: Iterable[Mapping[str, Any]], most: int) -> None:
        self._document = document
        self._references_left = most
        self._most_objects = most * _OBJECTS_FOR_A_REFERENCE
        self._anchored: dict[str, list[Mapping[str, Any]]] = {}
        for part in parts:
            for name in {part[key] for key in _ANCHORS if isinstance(part.get(key), str)}:
                self._anchored.setdefault(name, []).append(part)
        self._targets: dict[str, _Applied] = {}
        self._applied: dict[tuple[int, frozenset[str]], _Applied] = {}
        self.objects = 0
        self.patterns = 0
        self.is_circular = False

    def apply(self, place: _Applied, above: frozenset[str], times: int) -> None:
        """Count what applying ``place`` so many times applies, behind the references ``above`` it."""
        self.objects += place.objects * times
        self.patterns += place.patterns * times
        if self.objects > self._most_objects:
            raise SchemaReferencesError("too much of it is applied to one value")
        for reference, times_within in place.references:
            self._references_left -= 1
            if self._references_left < 0 or len(above) >= _MAX_CHAIN:
                raise SchemaReferencesError("its references refer to too many others")
            if reference in above:
                self.is_circular = True
            else:
                self.apply(self._target(reference), above | {reference}, times * times_within)

    def applied(self, place: object, without: frozenset[str] = _DEFINITIONS) -> _Applied:
        """Return what ``place`` applies: without its definitions, which apply where they are referred to."""
        if not isinstance(place, Mapping | list):
            return _NOTHING
        key = (id(place), without)
        if key not in self._applied:
            self._applied[key] = self._sum(place, without)
        return self._applied[key]

    def _target(self, reference: str) -> _Applied:
        """Return what the target of ``reference`` applies: of an anchor, all that have its name."""
        known = self._targets.get(reference)
        if known is None:
            known = self._targets[reference] = self.applied(self._place(reference))
        return known

    def _place(self, reference: str) -> object:
        fragment = unquote(reference.removeprefix("#"))
        if not fragment.startswith("/") and fragment:
            if fragment not in self._anchored:
                raise SchemaReferencesError("a reference leads nowhere")
            return self._anchored[fragment]
        place: Any = self._document
        for part in fragment.split("/")[1:]:
            place = _member(place, part.replace("~1", "/").replace("~0", "~"))
        return place

    def _sum(self, place: Mapping[str, Any] | list[Any], without: frozenset[str]) -> _Applied:
        if isinstance(place, list):
            own, times, items = _NOTHING, 1, place
        else:
            references = tuple((reference, 1) for reference in _references_of(place))
            own = _Applied(1, _patterns_of(place), references)
            times = 1 if _UNEVALUATED.isdisjoint(place) else _TIMES_OF_UNEVALUATED
            items = [item for name, item in place.items() if name not in without]
        within = [self.applied(item, frozenset()) for item in items]
        return _Applied(
            own.objects + times * sum(part.objects for part in within),
            own.patterns + times * sum(part.patterns for part in within),
            (*own.references, *((name, often * times) for part in within for name, often in part.references)),
        )


def _member(place: object, name: str) -> Any:
    if isinstance(place, Mapping) and name in place:
        return place[name]
    if isinstance(place, list) and _INDEX.fullmatch(name) and int(name) < len(place):
        return place[int(name)]
    raise SchemaReferencesError("a reference leads nowhere")


def _references_of(part: Mapping[str, Any]) -> Iterator[str]:
    return (part[name] for name in _REFERENCES if isinstance(part.get(name), str))


def _patterns_of(part: Mapping[str, Any]) -> int:
    """Return how many patterns ``part`` itself has: one, and one for each name of ``patternProperties``."""
    named = part.get("patternProperties")
    return isinstance(part.get("pattern"), str) + (len(named) if isinstance(named, Mapping) else 0)


def _parts(schema: object) -> Iterator[Mapping[str, Any]]:
    """Yield every object within ``schema``, itself first."""
    waiting = [schema]
    while waiting:
        place = waiting.pop()
        if isinstance(place, list):
            waiting += place
        elif isinstance(place, Mapping):
            yield place
            waiting += place.values()


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
