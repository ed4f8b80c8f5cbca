"""Which rule of its schema a value violates, in words that a person or a model can act on.

What is said comes from the schema: the member's JSON pointer (RFC 6901), the rule, and what is allowed. Must
not contain a value, nor the name of a member that the schema does not know: both are the sender's text.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jsonschema_rs

from schemas.canonical import jcs
from schemas.error_roots import EdgeError
from schemas.text import printable

MAX_SENTENCE = 384
"""An error envelope's message holds this and a constant beginning (``schemas.errors.MAX_TEXT``)."""

_MAX_POINTER = 128
_MAX_RULE = 64
_MAX_ALLOWED = 160
_SIMILAR = 0.5  # of difflib: "interval" is near "interval_ms"

Schema = Mapping[str, Any]


class ViolationError(EdgeError):
    """A value does not fit its schema. All of it is printable ASCII, and holds no value.

    Attributes:
        where: JSON pointer of the member that violates the rule; ``/`` is the whole value.
        rule: the keyword of JSON Schema.
        sentence: where, what is wrong, and what is allowed.
        fix: what to change.
    """

    def __init__(self, where: str, rule: str, sentence: str = "", fix: str = "") -> None:
        super().__init__(where, rule)
        self.where = where
        self.rule = rule
        self.sentence = sentence
        self.fix = fix

    def __str__(self) -> str:
        return f"{self.where} violates {self.rule}"


def violation_of(error: jsonschema_rs.ValidationError, schema: Schema) -> ViolationError:
    """Return the description of ``error``. ``schema`` is the one whose keyword is violated."""
    where = _pointer(error.instance_path)
    rule = printable(str(error.schema_path[-1]) if error.schema_path else "schema", _MAX_RULE)
    sentence, fix = _described(error.kind, rule, where, schema)
    return ViolationError(where, rule, printable(sentence, MAX_SENTENCE), printable(fix, MAX_SENTENCE))


def _described(
    kind: jsonschema_rs.ValidationErrorKind, rule: str, where: str, schema: Schema
) -> tuple[str, str]:
    match kind.name:
        case "required":
            missing = _member(where, str(kind.value))
            return f"{missing} is missing", f"Add the member {missing}."
        case "additionalProperties" | "unevaluatedProperties":
            return _unexpected(where, str(kind.value[0]), sorted(schema.get("properties", {})))
        case _:
            allowed = _ALLOWED.get(rule, _as_rule)(rule, schema.get(rule))
            subject = "the whole value" if where == "/" else where
            return f"{subject} must {allowed}", f"Change {subject}: it must {allowed}."


def _unexpected(where: str, name: str, known: Sequence[str]) -> tuple[str, str]:
    place = "the value" if where == "/" else where
    if not known:
        return f"{place} has a member, and none is allowed", f"Remove all members of {place}."
    # Here, not above: most nodes run for months without a call that needs it.
    from difflib import get_close_matches  # noqa: PLC0415

    members = _listed(known)
    near = get_close_matches(name[:_MAX_RULE], known, n=1, cutoff=_SIMILAR)
    if near:
        nearest = _member(where, near[0])
        sentence = f"{place} has a member that is not allowed, nearest to {nearest}; allowed are {members}"
        return sentence, f"Rename it to {near[0]}, or remove it."
    return f"{place} has a member that is not allowed; allowed are {members}", "Remove it."


def _pointer(path: Sequence[str | int]) -> str:
    return printable("/" + "/".join(_escaped(str(part)) for part in path), _MAX_POINTER)


def _member(where: str, name: str) -> str:
    return printable(f"{where.rstrip('/')}/{_escaped(name)}", _MAX_POINTER)


def _escaped(part: str) -> str:
    return part.replace("~", "~0").replace("/", "~1")


def _listed(values: Sequence[object]) -> str:
    """Return ``values``, which are a schema's, as text of bounded length."""
    shown: list[str] = []
    length = 0
    for value in values:
        text = value if isinstance(value, str) else jcs(value).decode("utf-8")
        length += len(text) + 2
        if shown and length > _MAX_ALLOWED:
            return ", ".join(shown) + f" and {len(values) - len(shown)} more"
        shown.append(text)
    return ", ".join(shown)


def _as_rule(rule: str, _value: object) -> str:
    return f"satisfy the rule {rule} of the input schema"


def _types(_rule: str, value: object) -> str:
    types = value if isinstance(value, list) else [value]
    return "be of type " + " or ".join(str(each) for each in types)


def _sized(phrase: str) -> Callable[[str, object], str]:
    """Return what describes a bound; a noun in the plural loses its last letter for one."""
    return lambda _rule, value: phrase.format(value).removesuffix("s" if value == 1 else "")


_ALLOWED: Mapping[str, Callable[[str, object], str]] = {
    "type": _types,
    "enum": lambda _rule, value: "be one of " + _listed(value if isinstance(value, list) else []),
    "const": lambda _rule, value: "be " + _listed([value]),
    "minimum": _sized("be at least {}"),
    "maximum": _sized("be at most {}"),
    "exclusiveMinimum": _sized("be more than {}"),
    "exclusiveMaximum": _sized("be less than {}"),
    "multipleOf": _sized("be a multiple of {}"),
    "minLength": _sized("have at least {} characters"),
    "maxLength": _sized("have at most {} characters"),
    "minItems": _sized("have at least {} items"),
    "maxItems": _sized("have at most {} items"),
    "minProperties": _sized("have at least {} members"),
    "maxProperties": _sized("have at most {} members"),
    "uniqueItems": _sized("not contain an item twice"),
    "pattern": _sized("match the pattern {}"),
    "format": _sized("have the format {}"),
}
