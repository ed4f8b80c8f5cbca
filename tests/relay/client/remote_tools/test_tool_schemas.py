"""A server's schemas: compiled without a network, within limits, and applied in bounded time."""

import time
from typing import Any

import pytest

from relay.client.remote_tools.tool_schemas import MAX_DEPTH, MAX_SCHEMA_BYTES, UnusableSchemaError, compiled


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "object"}
    for _ in range(depth):
        schema = {"if": schema}
    return schema


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "http://127.0.0.1:9/schema.json"},
        {"properties": {"a": {"$ref": "https://evil.example/x"}}},
        {"properties": {"a": [{"$dynamicRef": "file:///etc/passwd"}]}},
        {"$defs": {"a": {}}, "$ref": "other.json#/$defs/a"},
        {"$recursiveRef": "x"},
        {"$schema": "https://evil.example/dialect", "type": "object"},
        {"$ref": "#/$defs/absent"},
        {"type": "no such type"},
        {"pattern": "("},
        {"description": "x" * MAX_SCHEMA_BYTES},
        nested(MAX_DEPTH),
    ],
    ids=lambda schema: str(schema)[:40],
)
def test_a_schema_that_reaches_out_or_exceeds_a_limit_is_not_compiled(schema: dict[str, Any]) -> None:
    with pytest.raises(UnusableSchemaError) as caught:
        compiled(schema)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 300


def test_references_that_multiply_are_refused() -> None:
    doubled = {f"a{number}": {"allOf": [{"$ref": f"#/$defs/a{number + 1}"}] * 2} for number in range(40)}
    with pytest.raises(UnusableSchemaError, match="too many others"):
        compiled({"$ref": "#/$defs/a0", "$defs": {**doubled, "a40": {}}})


def test_the_limits_themselves_are_accepted() -> None:
    rest = len('{"description":""}')
    assert compiled({"description": "x" * (MAX_SCHEMA_BYTES - rest)}).fault(1) is None
    assert compiled(nested(MAX_DEPTH - 1)).fault({}) is None


@pytest.mark.parametrize(
    "dialect", ["http://json-schema.org/draft-07/schema#", "https://json-schema.org/draft/2020-12/schema"]
)
def test_a_reference_within_the_document_is_followed_in_each_dialect(dialect: str) -> None:
    properties = {"a": {"$ref": "#/$defs/n"}}
    check = compiled({"$schema": dialect, "$defs": {"n": {"type": "integer"}}, "properties": properties})
    assert check.fault({"a": 1}) is None
    assert check.fault({"a": "x"}) == "/a violates type"


def test_a_property_may_be_called_as_a_reference_is() -> None:
    assert compiled({"properties": {"$ref": {"type": "string"}}}).fault({"$ref": "x"}) is None


def test_a_fault_names_the_rule_and_the_place_and_nothing_of_the_value() -> None:
    check = compiled({"properties": {"a": {"type": "array", "items": {"maxLength": 3}}}})
    assert check.fault({"a": ["xyz", "a secret"]}) == "/a/1 violates maxLength"


CLOSED = {"additionalProperties": False, "properties": {"message": {"type": "string"}, "count": {}}}


@pytest.mark.parametrize(
    ("schema", "arguments", "fault"),
    [
        (CLOSED, {"mesage": "ping"}, "there is no argument mesage; the nearest is message"),
        (CLOSED | {"required": ["count"]}, {}, "count is missing"),
        (CLOSED, {"message": 7}, "/message violates type"),
        (CLOSED, {"message": "ping"}, None),
        (
            {"properties": {"a": CLOSED}},
            {"a": {"cont": 1}},
            "there is no argument /a/cont; the nearest is count",
        ),
        (
            {"$defs": {"n": CLOSED}, "properties": {"a": {"$ref": "#/$defs/n"}}},
            {"a": {"\x1b": 1}},
            "there is no argument /a/\\x1b; the nearest is message",
        ),
        ({"properties": {}, "additionalProperties": False}, {"any": 1}, "there is no argument any"),
        (
            {"unevaluatedProperties": False, "properties": {"count": {}}},
            {"count": 1, "c": 2},
            "there is no argument c; the nearest is count",
        ),
    ],
)
def test_a_mistaken_argument_is_named_with_the_nearest_that_the_tool_has(
    schema: dict[str, Any], arguments: dict[str, Any], fault: str | None
) -> None:
    assert compiled(schema).argument_fault(arguments) == fault


def test_a_pattern_does_not_take_unbounded_time() -> None:
    check = compiled({"type": "string", "pattern": r"^(?=(a+)+$)(a|aa)+\1$"})
    began_s = time.process_time()
    assert check.fault("a" * 5000 + "!") is not None
    # Not a measurement: without the limit it takes longer than the universe is old.
    assert time.process_time() - began_s < 60


def test_a_circle_that_is_applied_twice_at_each_level_takes_no_time_that_doubles() -> None:
    again = {"properties": {"a": {"$ref": "#"}}}
    check = compiled({"type": ["object", "number"], "anyOf": [again, {**again, "minProperties": 1}]})
    value: object = "no number"
    for _ in range(50):
        value = {"a": value}
    assert check.fault(value) == "a rule is violated"
    assert check.fault({"a": {"a": 1}}) is None


def test_a_large_result_of_another_type_takes_no_memory_for_each_part_that_is_wrong() -> None:
    # A validator keeps a kibibyte of each fault: a million of them would end this process.
    check = compiled({"items": {"anyOf": [{"type": "string"}] * 15}})
    assert check.fault([0] * 1_000_000) == "a rule is violated"


def test_a_value_with_too_many_parts_for_a_large_schema_does_not_fit_it() -> None:
    check = compiled({"items": {"anyOf": [{}] * 5000}})
    assert check.fault([0] * 1000) is None
    assert check.fault([0] * 10_000) == "it has too many parts for this schema"


def test_what_is_not_evaluated_elsewhere_may_be_within_itself_a_few_times() -> None:
    def nested(depth: int) -> dict[str, Any]:
        return {"allOf": [nested(depth - 1)], "unevaluatedProperties": {}} if depth else {"type": "object"}

    assert compiled(nested(6)).fault({"a": 1}) is None
    with pytest.raises(UnusableSchemaError, match="too much of it"):
        compiled(nested(20))
