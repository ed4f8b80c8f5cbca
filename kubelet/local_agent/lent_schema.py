"""The input schema of a lent tool: compiled without any network, or refused.

The caller wrote it, and the caller may be hostile: a reference would be fetched, a pattern or a web of
references could take minutes to evaluate. Must not change a schema: it is shown as it was lent.
"""

from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

import jsonschema_rs

from schemas.caller_tools import MAX_SCHEMA_BYTES, size_of
from schemas.error_roots import PeerError
from schemas.errors import Failure, ToolError
from schemas.text import printable

MAX_EXPANSIONS = 512
"""The references that one schema applies, each counted as often as it is reached."""

_MAX_CHAIN = 64
_REFERENCES = ("$ref", "$dynamicRef", "$recursiveRef")


class LentSchemaError(PeerError):
    """A schema is refused; the text is a constant of ours."""


class LentSchema:
    """The compiled schema of one lent tool.

    Raises:
        LentSchemaError: it is refused.
    """

    def __init__(self, schema: dict[str, Any]) -> None:
        if size_of(schema) > MAX_SCHEMA_BYTES:
            raise LentSchemaError(f"larger than {MAX_SCHEMA_BYTES} bytes")
        if schema.get("type") != "object":
            # One tool with another would make clients refuse the whole list.
            raise LentSchemaError("its type is not object")
        if not all(text.startswith("#") for text in _texts_of_references(schema)):
            raise LentSchemaError("a reference leads out of the document")
        expansions = _expansions(schema, schema, frozenset())
        if next(islice(expansions, MAX_EXPANSIONS, None), None) is not None:
            raise LentSchemaError("its references refer to too many others")
        try:
            # offline: nothing is fetched. RegexOptions: patterns in linear time, without backtracking.
            self._compiled = jsonschema_rs.validator_for(
                schema, offline=True, pattern_options=jsonschema_rs.RegexOptions()
            )
        except (jsonschema_rs.ValidationError, ValueError):
            raise LentSchemaError("no JSON Schema that can be compiled") from None

    def check(self, arguments: Mapping[str, Any]) -> None:
        """Return when ``arguments`` fit.

        Raises:
            ToolError: they do not; it names the member and the rule.
        """
        try:
            error = next(self._compiled.iter_errors(arguments), None)
        except ValueError:
            raise ToolError(Failure.ARGUMENTS_INVALID, "A text in the arguments is not Unicode.") from None
        if error is None:
            return
        where = printable("/" + "/".join(str(part) for part in error.instance_path), 128)
        # The keyword alone: what the schema contains beside it is the caller's text.
        rule = str(error.schema_path[-1]) if error.schema_path else "schema"
        detail = f"The arguments do not fit the schema of the caller: {where} violates {printable(rule, 64)}."
        raise ToolError(Failure.ARGUMENTS_INVALID, detail)


def _texts_of_references(schema: object) -> Iterator[str]:
    for part in _parts(schema):
        yield from (part[name] for name in _REFERENCES if isinstance(part.get(name), str))


def _parts(schema: object) -> Iterator[Mapping[str, Any]]:
    """Yield every object within ``schema``, itself included."""
    if isinstance(schema, list):
        for item in schema:
            yield from _parts(item)
    elif isinstance(schema, dict):
        yield schema
        for item in schema.values():
            yield from _parts(item)


def _expansions(document: Mapping[str, Any], place: object, above: frozenset[str]) -> Iterator[str]:
    """Yield each reference that applying ``place`` follows, and those behind it, but in no circle."""
    for part in _parts_applied(place):
        for name in _REFERENCES:
            reference = part.get(name)
            if isinstance(reference, str):
                yield reference
                if len(above) >= _MAX_CHAIN:
                    raise LentSchemaError("its references refer to too many others")
                if reference not in above:
                    yield from _expansions(document, _target(document, reference), above | {reference})


def _parts_applied(place: object) -> Iterator[Mapping[str, Any]]:
    """Yield every object within ``place``, without definitions: they apply where they are referred to."""
    if isinstance(place, dict):
        place = {name: item for name, item in place.items() if name not in {"$defs", "definitions"}}
    return _parts(place)


def _target(document: Mapping[str, Any], reference: str) -> object:
    """Return what a JSON pointer leads to; for an anchor the whole document, which it cannot exceed."""
    place: Any = document
    for part in reference.removeprefix("#").split("/")[1:]:
        name = part.replace("~1", "/").replace("~0", "~")
        if isinstance(place, list) and name.isdecimal() and int(name) < len(place):
            place = place[int(name)]
        elif isinstance(place, dict) and name in place:
            place = place[name]
        else:
            return None
    return place
