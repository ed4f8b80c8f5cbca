"""Values made from a JSON Schema: such that fit it, and such that nearly do.

Knows the keywords that the shipped documents use, and raises on any other, so that none is overlooked.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any, Final

from hypothesis import strategies as st

from schemas.registry import SCHEME, SchemaRegistry

Strategy = st.SearchStrategy[Any]
_Make = Callable[[Mapping[str, Any]], Strategy]

_ANNOTATIONS: Final = {"$schema", "$id", "$defs", "title", "description", "default"}
_KEYWORDS: Final = {
    *("$ref", "oneOf", "allOf", "if", "then", "const", "enum", "type", "properties", "required"),
    *("additionalProperties", "minimum", "maximum", "exclusiveMinimum", "minLength", "maxLength", "pattern"),
    *("items", "minItems", "maxItems", "uniqueItems", "contains", "minProperties", "maxProperties"),
}
_GREATEST: Final = 2**53 - 1
_FEW: Final = 3
_SHORT: Final = 4
_LONG: Final = re.compile(r"\^(?P<letter>\[[^]]+\])\{(?P<length>\d+)\}\$")

_scalars: Strategy = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-_GREATEST, _GREATEST),
    st.floats(allow_nan=False, allow_infinity=False, width=32),
    st.text(st.characters(codec="utf-8"), max_size=5),
)
anything: Strategy = st.recursive(
    _scalars,
    lambda inner: (
        st.lists(inner, max_size=_FEW) | st.dictionaries(st.text("abc", max_size=3), inner, max_size=_FEW)
    ),
    max_leaves=5,
)
"""Any JSON, small."""


@cache
def fitting(registry: SchemaRegistry, ref: str) -> Strategy:
    """Return the values that fit the document ``ref``."""
    document = registry.document(ref)
    return _Maker(registry, document).value(document)


@cache
def nearly_fitting(registry: SchemaRegistry, ref: str) -> Strategy:
    """Return values that fit the document ``ref`` but for one place, or in spite of it."""
    return fitting(registry, ref).flatmap(nearly)


def nearly(value: Any) -> Strategy:
    """Return what ``value`` is with one place of it spoiled."""
    return st.sampled_from(list(_places(value))).flatmap(
        lambda place: _spoiled(_at(value, place)).map(lambda spoiled: _with(value, place, spoiled))
    )


class _Maker:
    """Makes values for the schemas of one document."""

    def __init__(self, registry: SchemaRegistry, document: Mapping[str, Any]) -> None:
        self._registry = registry
        self._document = document

    def value(self, schema: Mapping[str, Any]) -> Strategy:
        if unknown := set(schema) - _KEYWORDS - _ANNOTATIONS:
            raise NotImplementedError(f"values for {sorted(unknown)}")
        if "$ref" in schema:
            return self._referred(schema["$ref"])
        if "oneOf" in schema:
            return st.one_of([self.value(each) for each in schema["oneOf"]])
        if "allOf" in schema:
            return st.one_of([self.value(each) for each in _cases(schema)])
        if "const" in schema:
            return st.just(schema["const"])
        if "enum" in schema:
            return st.sampled_from(schema["enum"])
        types = schema.get("type", "anything")
        makers: Mapping[str, _Make] = {
            "object": self._object,
            "array": self._array,
            "string": _string,
            "integer": _integer,
            "number": _number,
            "boolean": lambda _: st.booleans(),
            "null": lambda _: st.none(),
            "anything": lambda _: anything,
        }
        return st.one_of([makers[each](schema) for each in ([types] if isinstance(types, str) else types)])

    def _referred(self, target: str) -> Strategy:
        ref, _, pointer = target.removeprefix(SCHEME).partition("#")
        document = self._registry.document(ref) if ref else self._document
        found: Any = document
        for part in pointer.split("/")[1:]:
            found = found[int(part) if isinstance(found, list) else part]
        return _Maker(self._registry, document).value(found)

    def _object(self, schema: Mapping[str, Any]) -> Strategy:
        properties = {name: each for name, each in schema.get("properties", {}).items() if each is not False}
        required = set(schema.get("required", ()))
        made = {name: self.value(each) for name, each in properties.items()}
        always = {name: each for name, each in made.items() if name in required}
        optional = {name: each for name, each in made.items() if name not in required}
        if schema.keys() & {"minProperties", "maxProperties"}:
            least = max(0, schema.get("minProperties", 0) - len(always))
            most = min(len(optional), schema.get("maxProperties", len(made)) - len(always))
            chosen = st.lists(st.sampled_from(sorted(optional)), min_size=least, max_size=most, unique=True)
            known = chosen.flatmap(
                lambda names: st.fixed_dictionaries(always | {name: optional[name] for name in names})
            )
        else:
            known = st.fixed_dictionaries(always, optional=optional)
        if schema.get("additionalProperties", True) is False:
            return known
        strange = st.text("xyz", min_size=1, max_size=3)
        return st.builds(
            lambda extra, own: extra | own, st.dictionaries(strange, anything, max_size=2), known
        )

    def _array(self, schema: Mapping[str, Any]) -> Strategy:
        least = schema.get("minItems", 0)
        most = min(schema.get("maxItems", least + _FEW), least + _FEW)
        items = self.value(schema.get("items", {}))
        made = st.lists(items, min_size=least, max_size=most, unique=schema.get("uniqueItems", False))
        if "contains" not in schema:
            return made
        return st.builds(lambda one, others: [*others, one], self.value(schema["contains"]), made)


def _cases(schema: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Return what ``allOf`` with an ``if`` and a ``then`` in each comes to, case by case."""
    base = {keyword: value for keyword, value in schema.items() if keyword != "allOf"}
    for clause in schema["allOf"]:
        yield _both(_both(base, clause["if"]), clause["then"])


def _both(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    """Return one schema for what fits two of which the second is the narrower."""
    merged = dict(first)
    for keyword, value in second.items():
        known = merged.get(keyword)
        merged[keyword] = (
            _both(known, value) if isinstance(known, dict) and isinstance(value, dict) else value
        )
    return merged


def _string(schema: Mapping[str, Any]) -> Strategy:
    least, most = schema.get("minLength", 0), schema.get("maxLength", 1 << 20)
    pattern = schema.get("pattern")
    if pattern is not None:
        # Python's `$` takes a line feed behind the end, which the documents do not mean.
        made = _matching(pattern).map(lambda text: text.removesuffix("\n"))
    else:
        made = st.text(st.characters(codec="utf-8"), max_size=min(most, least + 8))
    longest = "a" * (most if "maxLength" in schema else 40)

    def fits(text: str) -> bool:
        return least <= len(text) <= most and (pattern is None or re.search(pattern, text) is not None)

    return st.one_of([made.filter(fits), *([st.just(longest)] if fits(longest) else [])])


def _matching(pattern: str) -> Strategy:
    if (long := _LONG.fullmatch(pattern)) and int(long["length"]) > _SHORT:
        # Keys and hashes: to draw each letter of them would take most of the time.
        length = int(long["length"])
        piece = st.from_regex(re.compile(f"{long['letter']}{{{_SHORT}}}", re.ASCII), fullmatch=True)
        return piece.map(lambda text: (text * length)[:length])
    return st.from_regex(re.compile(pattern, re.ASCII))


def _integer(schema: Mapping[str, Any]) -> Strategy:
    least, most = schema.get("minimum", -_GREATEST), schema.get("maximum", _GREATEST)
    # JSON has one kind of number: 1.0 is an integer.
    return st.integers(least, most) | st.sampled_from([least, most, float(least)])


def _number(schema: Mapping[str, Any]) -> Strategy:
    least = schema.get("minimum", schema.get("exclusiveMinimum", -1e30))
    most, over = schema.get("maximum", 1e30), "exclusiveMinimum" in schema
    return st.floats(least, most, exclude_min=over) | st.just(most)


_Place = tuple[str | int, ...]


def _places(value: Any, here: _Place = ()) -> Iterator[_Place]:
    yield here
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, each in inner:
        yield from _places(each, (*here, key))


def _at(value: Any, place: _Place) -> Any:
    for key in place:
        value = value[key]
    return value


def _with(value: Any, place: _Place, new: Any) -> Any:
    if not place:
        return new
    copy: Any = dict(value) if isinstance(value, dict) else list(value)
    copy[place[0]] = _with(value[place[0]], place[1:], new)
    return copy


_OTHERS: Final[tuple[Any, ...]] = (
    None,
    True,
    False,
    0,
    1,
    -1,
    1.0,
    0.5,
    "",
    "0",
    [],
    {},
    2**53,
    2**64,
    10**30,
)
_ODD_NUMBERS: Final = (float("nan"), float("inf"), float("-inf"), 1e308, 5e-324, -0.0)
_ODD_ENDS: Final = ("\n", "\r", "\r\n", "\u2028", "\x00", " ", "a", "\x7f", "\xe9", "\ud800", "\U0001f600")


def _spoiled(value: Any) -> Strategy:
    """Return what is nearly ``value``, or something else altogether."""
    other = st.sampled_from(_OTHERS)
    if isinstance(value, dict):
        return st.one_of(_members(value), other)
    if isinstance(value, list):
        return st.sampled_from([value[1:], value + value[:1], [*value, None], value * 70, []]) | other
    if isinstance(value, str):
        return st.one_of(_texts(value), other)
    if isinstance(value, int | float):
        near = [value + 1, value - 1, -value, value + 0.5, float(value), value * 2, str(value)]
        return st.sampled_from(near) | st.sampled_from(_ODD_NUMBERS) | other
    return other


def _members(value: Mapping[str, Any]) -> Strategy:
    stray = st.sampled_from(["x", "", "__proto__", "$ref", "id\n", "\ud800"])
    added = st.builds(lambda name, inner: {**value, name: inner}, stray, anything)
    if not value:
        return added
    names = st.sampled_from(sorted(value))
    lacking = names.map(lambda name: {key: each for key, each in value.items() if key != name})
    renamed = names.map(lambda name: {key.upper() if key == name else key: value[key] for key in value})
    return added | lacking | renamed


def _texts(value: str) -> Strategy:
    foreign = value.translate({ord(digit): 0x0660 + int(digit) for digit in "0123456789"})
    near = [
        foreign,
        value.upper(),
        value.lower(),
        value[1:],
        value[:-1],
        f" {value}",
        f"\n{value}",
        value * 2,
    ]
    return st.sampled_from(near) | st.sampled_from([value + end for end in _ODD_ENDS])
