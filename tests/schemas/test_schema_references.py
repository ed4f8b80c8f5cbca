"""Which of a stranger's schemas are applied, to how large a value, and which are refused before that."""

import time
from collections.abc import Mapping
from typing import Any

import pytest

from schemas.schema_references import (
    MAX_APPLICATIONS,
    MAX_EXPLAINED,
    MAX_PATTERN_BYTES,
    MAX_PATTERN_SIZE,
    SchemaReferencesError,
    extent_of,
)

MOST = 512
TOO_MANY = "too many others"
TOO_MUCH = "too much of it"
NOWHERE = "leads nowhere"
OWN = "of its own"


def chain(length: int, reference: str = "#/$defs/a", last: Any = None, **members: Any) -> dict[str, Any]:
    """Return definitions of which each applies the next twice, by a reference that begins so."""
    twice = {f"a{number}": {"allOf": [{"$ref": f"{reference}{number + 1}"}] * 2} for number in range(length)}
    return {**members, "$defs": {**twice, f"a{length}": last or {}}}


def anchored(length: int, anchor: str, reference: str) -> dict[str, Any]:
    named = {
        f"d{number}": {anchor: f"a{number}", "allOf": [{reference: f"#a{number + 1}"}] * 2}
        for number in range(length)
    }
    return {reference: "#a0", "$defs": {**named, "last": {anchor: f"a{length}"}}}


def unevaluated(depth: int, keyword: str) -> dict[str, Any]:
    """Return a schema without references that a validator takes three times as long for with each level."""
    schema: dict[str, Any] = {"type": "object"}
    for _ in range(depth):
        schema = {"allOf": [schema], keyword: {}}
    return schema


@pytest.mark.parametrize(
    "schema",
    [
        {},
        {"$id": "https://server.example/tool", "$ref": "#/$defs/a", "$defs": {"a": {}}},
        {"$ref": "#/$defs/a~1b~0c%20d", "$defs": {"a/b~c d": {}}},
        {"allOf": [{"type": "object"}, {"$ref": "#/allOf/0"}]},
        {"properties": {"next": {"$ref": "#"}}},
        {"properties": {"id": {"type": "string"}, "$id": {"type": "string"}, "$ref": {"type": "string"}}},
        {"$ref": "#here", "$defs": {"a": {"$anchor": "here"}}},
        {"properties": {"next": {"$dynamicRef": "#here"}}, "$dynamicAnchor": "here"},
        chain(7, **{"$ref": "#/$defs/a0"}),
        chain(300),
        unevaluated(5, "unevaluatedProperties"),
    ],
    ids=[
        "none",
        "an id of the whole",
        "escapes",
        "an index",
        "a circle",
        "properties of such names",
        "an anchor",
        "a dynamic anchor",
        "few that multiply",
        "definitions that are not applied",
        "unevaluated properties",
    ],
)
def test_references_within_the_document_are_accepted(schema: Mapping[str, Any]) -> None:
    extent_of(schema, MOST)


@pytest.mark.parametrize("reference", ["$ref", "$dynamicRef", "$recursiveRef"])
@pytest.mark.parametrize("target", ["other.json", "https://a.example/", "", "?#", "file:///etc/passwd"])
def test_a_reference_to_anything_else_is_refused(reference: str, target: str) -> None:
    with pytest.raises(SchemaReferencesError, match="out of the document"):
        extent_of({"properties": {"a": {reference: target}}}, MOST)


@pytest.mark.parametrize(
    ("schema", "why"),
    [
        pytest.param(chain(40, **{"$ref": "#/$defs/a0"}), TOO_MANY, id="by pointers"),
        pytest.param(chain(40, "#/%24defs/a", **{"$ref": "#/$defs/a0"}), TOO_MANY, id="by escaped pointers"),
        pytest.param(chain(40, "#/$defs/%61", **{"$ref": "#/$defs/a0"}), TOO_MANY, id="by an escaped name"),
        pytest.param(anchored(40, "$anchor", "$ref"), TOO_MANY, id="by anchors"),
        pytest.param(anchored(40, "$dynamicAnchor", "$dynamicRef"), TOO_MANY, id="by dynamic anchors"),
        pytest.param(
            {
                "$ref": "#/$defs/inner",
                "$defs": {"a0": {}, "inner": chain(40, **{"$id": "urn:a:b", "$ref": "#/$defs/a0"})},
            },
            OWN,
            id="within a schema that is another document",
        ),
        pytest.param(
            {
                "$schema": "http://json-schema.org/draft-04/schema#",
                "allOf": [{"$ref": "#/definitions/inner"}],
                "definitions": {"inner": {"id": "urn:a:b"}},
            },
            OWN,
            id="the same in an old dialect",
        ),
        pytest.param(
            {"$defs": {"a": {"$schema": "http://json-schema.org/draft-04/schema#"}}},
            OWN,
            id="in two dialects",
        ),
        pytest.param({"$ref": "#/$defs/a"}, NOWHERE, id="to no definition"),
        pytest.param({"$ref": "#a"}, NOWHERE, id="to no anchor"),
        pytest.param({"allOf": [{"$ref": "#/allOf/1"}]}, NOWHERE, id="beyond a list"),
        pytest.param(
            {"allOf": [{"$ref": "#/allOf/" + "9" * 5000}]}, NOWHERE, id="to a number of 5000 digits"
        ),
        pytest.param({"allOf": [{"$ref": "#/allOf/\u0660"}]}, NOWHERE, id="to a digit of another script"),
        pytest.param(
            {"anyOf": [{"$ref": "#/$defs/a"}] * 400, "$defs": {"a": {"enum": [{}] * 1000}}},
            TOO_MUCH,
            id="to much, often",
        ),
        pytest.param(unevaluated(8, "unevaluatedProperties"), TOO_MUCH, id="by what is not evaluated"),
        pytest.param(unevaluated(8, "unevaluatedItems"), TOO_MUCH, id="the same of items"),
    ],
)
def test_what_multiplies_or_is_resolved_otherwise_is_refused(schema: Mapping[str, Any], why: str) -> None:
    with pytest.raises(SchemaReferencesError, match=why) as caught:
        extent_of(schema, MOST)
    assert str(caught.value).isascii()


@pytest.mark.parametrize(
    "schema",
    [
        {**anchored(11, "$anchor", "$ref"), "enum": [{}] * 9000},
        chain(11, **{"$ref": "#/$defs/a0"}, last={"enum": [1] * 14_000}),
    ],
    ids=["to anchors of a large document", "to a large definition"],
)
def test_references_are_counted_in_time_that_grows_with_the_size_alone(schema: dict[str, Any]) -> None:
    began_s = time.process_time()
    extent_of(schema, 4096)
    # Not a measurement: with a search for each reference it takes a minute, and holds the interpreter's lock.
    assert time.process_time() - began_s < 3


# --- how large a value may be -----------------------------------------------------------------------------

CIRCLE = {"properties": {"left": {"$ref": "#"}, "right": {"$ref": "#"}}}


@pytest.mark.parametrize(
    ("schema", "objects", "is_circular"),
    [
        ({}, 1, False),
        ({"properties": {"a": {"items": {}}}}, 4, False),
        ({"anyOf": [{"$ref": "#/$defs/a"}] * 2, "$defs": {"a": {"not": {}}}}, 7, False),
        ({"allOf": [{}, {}], "unevaluatedProperties": {}}, 13, False),
        (CIRCLE, 12, True),
    ],
    ids=["one", "within each other", "applied twice", "looked at again", "a circle"],
)
def test_the_objects_that_are_applied_are_counted(
    schema: Mapping[str, Any], objects: int, *, is_circular: bool
) -> None:
    extent = extent_of(schema, MOST)
    assert (extent.objects, extent.is_circular) == (objects, is_circular)


def test_a_value_is_judged_and_its_fault_searched_for_up_to_a_size() -> None:
    extent = extent_of({"items": {}}, MOST)
    assert extent.objects == 2
    most = MAX_EXPLAINED // 2
    assert extent.may_be_explained([0] * (most - 1))
    assert not extent.may_be_explained([0] * most)
    assert not extent.may_be_explained({"a": [[{}] * most]})
    assert extent.may_be_judged([0] * most)
    large = extent_of({"anyOf": [{} for _ in range(MOST * 30)]}, MOST)
    most = MAX_APPLICATIONS // large.objects
    assert large.may_be_judged([0] * (most - 1))
    assert not large.may_be_judged([0] * most)


def test_where_references_form_a_circle_no_fault_is_searched_for() -> None:
    extent = extent_of(CIRCLE, MOST)
    assert extent.may_be_judged({"left": {}})
    assert not extent.may_be_explained({})


def test_patterns_are_counted_as_often_as_they_are_applied_and_share_their_size() -> None:
    two = {"pattern": "a", "patternProperties": {"b": {}}, "properties": {"pattern": {}}}
    assert extent_of(two, MOST).patterns == 2
    fifty = extent_of({"allOf": [{"$ref": "#/$defs/two"}] * 25, "$defs": {"two": two}}, MOST)
    assert fifty.patterns == 50
    assert fifty.size_for_a_pattern() == MAX_PATTERN_SIZE
    many = extent_of({"allOf": [{"pattern": "a"} for _ in range(640)]}, MOST)
    assert many.size_for_a_pattern() == MAX_PATTERN_SIZE // 10
    assert many.may_be_matched(MAX_PATTERN_BYTES // 640)
    assert not many.may_be_matched(MAX_PATTERN_BYTES // 640 + 1)
    assert extent_of({}, MOST).may_be_matched(1 << 40)
