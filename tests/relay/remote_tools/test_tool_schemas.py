"""A server's schemas: compiled without a network, within limits, and applied in bounded time."""

import time
from typing import Any

import pytest

from relay.remote_tools.tool_schemas import MAX_DEPTH, MAX_SCHEMA_BYTES, UnusableSchemaError, compiled


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


def test_a_pattern_does_not_take_unbounded_time() -> None:
    check = compiled({"type": "string", "pattern": r"^(?=(a+)+$)(a|aa)+\1$"})
    began_s = time.process_time()
    assert check.fault("a" * 5000 + "!") is not None
    # Not a measurement: without the limit it takes longer than the universe is old.
    assert time.process_time() - began_s < 60
