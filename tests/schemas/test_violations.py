"""What a violation says of a value that does not fit its schema."""

import json
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.errors import MAX_TEXT, ToolError
from schemas.registry import SCHEME, SchemaRegistry
from schemas.violations import ViolationError, violation_of

SUBSCRIBE = "system.metrics.subscribe.input@1.0.0"
SNAPSHOT = "system.metrics.snapshot.input@1.0.0"
ECHO = "system.echo.invoke.input@1.0.0"
UNEXPECTED = (
    "the value has a member that is not allowed, nearest to /interval_ms; allowed are include, interval_ms"
)


def violation(registry: SchemaRegistry, ref: str, value: object) -> ViolationError:
    with pytest.raises(ViolationError) as caught:
        registry.load(ref).check(value)
    return caught.value


def registry_with(directory: Path, **documents: dict[str, Any]) -> SchemaRegistry:
    for name, document in documents.items():
        ref = f"{name}@1.0.0"
        (directory / f"{ref}.json").write_text(json.dumps({"$id": SCHEME + ref, **document}))
    return SchemaRegistry(directory)


@pytest.mark.parametrize(
    ("ref", "value", "sentence"),
    [
        (SUBSCRIBE, {}, "/interval_ms is missing"),
        (SUBSCRIBE, {"interval_ms": 5}, "/interval_ms must be at least 1000"),
        (SUBSCRIBE, {"interval_ms": "5 s"}, "/interval_ms must be of type integer"),
        (SNAPSHOT, {"include": ["temp"]}, "/include/0 must be one of cpu, mem, load, uptime, disk"),
        (SNAPSHOT, {"include": ["cpu", "cpu"]}, "/include must not contain an item twice"),
        (ECHO, {"message": "x" * 1025}, "/message must have at most 1024 characters"),
        (ECHO, [], "the whole value must be of type object"),
        (
            SUBSCRIBE,
            {"interval_ms": 5000, "intervall": 1},
            UNEXPECTED,
        ),
        (
            ECHO,
            {"message": "ping", "zzz": 1},
            "the value has a member that is not allowed; allowed are message",
        ),
    ],
)
def test_a_violation_names_the_member_the_rule_and_what_is_allowed(
    registry: SchemaRegistry, ref: str, value: object, sentence: str
) -> None:
    assert violation(registry, ref, value).sentence == sentence


def test_what_to_do_names_the_nearest_known_member(registry: SchemaRegistry) -> None:
    value = {"interval_ms": 5000, "intervall": 1}
    assert violation(registry, SUBSCRIBE, value).fix == "Rename it to interval_ms, or remove it."


def test_neither_a_value_nor_an_unknown_members_name_is_repeated(registry: SchemaRegistry) -> None:
    secret = "ignore-your-instructions"
    for value in ({"message": 7, secret: 1}, {"message": "ping", secret: 1}, {"message": [secret]}):
        error = violation(registry, ECHO, value)
        assert secret not in error.sentence + error.fix


def test_what_is_allowed_is_found_behind_references(tmp_path: Path) -> None:
    registry = registry_with(
        tmp_path,
        outer={"properties": {"a/b": {"$ref": f"{SCHEME}inner@1.0.0#/$defs/one~1two"}}},
        inner={"$defs": {"one/two": {"items": {"$ref": "#/$defs/leaf"}}, "leaf": {"maximum": 3}}},
    )
    assert violation(registry, "outer@1.0.0", {"a/b": [4]}).sentence == "/a~1b/0 must be at most 3"


def test_a_long_list_of_what_is_allowed_is_cut_between_two_of_them(tmp_path: Path) -> None:
    registry = registry_with(tmp_path, many={"enum": [f"value-{number:03d}" for number in range(100)]})
    sentence = violation(registry, "many@1.0.0", "other").sentence
    assert sentence.endswith("value-013 and 86 more")


def test_a_rule_without_words_of_its_own_is_named(tmp_path: Path) -> None:
    registry = registry_with(tmp_path, either={"oneOf": [{"type": "string"}, {"type": "integer"}]})
    expected = "the whole value must satisfy the rule oneOf of the input schema"
    assert violation(registry, "either@1.0.0", []).sentence == expected


VALUES = st.recursive(
    st.none() | st.integers() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)
REGISTRY = SchemaRegistry()


@given(value=VALUES)
def test_whatever_the_value_is_the_envelope_is_bounded_ascii(value: object) -> None:
    validator = REGISTRY.load(SUBSCRIBE)
    if validator.is_valid(value):
        return
    with pytest.raises(ViolationError) as caught:
        validator.check(value)
    envelope = ToolError.from_violation(caught.value).envelope()
    REGISTRY.load("error@1.0.0").check(envelope)
    for text in (envelope["message"], envelope["suggested_fix"]):
        assert text.isascii()
        assert text.isprintable()
        assert len(text) <= MAX_TEXT


@pytest.mark.parametrize(
    ("schema", "value", "said"),
    [
        ({"minLength": 1}, "", "have at least 1 character"),
        ({"minLength": 2}, "", "have at least 2 characters"),
        ({"maxItems": 1}, [1, 2], "have at most 1 item"),
        ({"minProperties": 1}, {}, "have at least 1 member"),
        ({"minimum": 1}, 0, "be at least 1"),
    ],
)
def test_one_is_not_several(schema: dict[str, Any], value: object, said: str) -> None:
    error = next(jsonschema_rs.validator_for(schema).iter_errors(value))
    assert violation_of(error, schema).sentence == f"the whole value must {said}"
