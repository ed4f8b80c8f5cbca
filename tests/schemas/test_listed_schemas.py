"""What a model reads of a tool: short, written for it, and the same rules as the contract's."""

import json
from typing import Any

import pytest

from schemas.listed_schemas import listed_schema
from schemas.registry import SchemaRegistry
from tests.fakes.shipped_kinds import KINDS

VERBS = [verb for kind in KINDS for verb in kind.verbs.values()]
REFS = sorted({ref for verb in VERBS for ref in (verb.input_ref, verb.output_ref)})


def rules(schema: Any) -> Any:
    """Return ``schema`` without what does not validate."""
    if isinstance(schema, dict):
        named = {"properties", "$defs"}
        return {
            key: {name: rules(each) for name, each in value.items()} if key in named else rules(value)
            for key, value in schema.items()
            if key not in {"description", "title", "$comment", "$id", "$schema"}
        }
    return [rules(each) for each in schema] if isinstance(schema, list) else schema


def descriptions(schema: Any) -> list[str]:
    if isinstance(schema, list):
        return [text for each in schema for text in descriptions(each)]
    if not isinstance(schema, dict):
        return []
    own = schema.get("description")
    inner = [text for each in schema.values() for text in descriptions(each)]
    return [own, *inner] if isinstance(own, str) else inner


@pytest.mark.parametrize("ref", REFS)
def test_the_rules_are_those_of_the_contract(registry: SchemaRegistry, ref: str) -> None:
    assert rules(listed_schema(registry, ref)) == rules(registry.document(ref))


@pytest.mark.parametrize("ref", REFS)
def test_every_description_is_one_that_was_written_for_models(registry: SchemaRegistry, ref: str) -> None:
    shown = descriptions(listed_schema(registry, ref))
    assert set(shown) == set((registry.notes(ref) or {}).values())
    assert all(text.isascii() for text in shown)
    assert not [text for text in shown if "MUST" in text or "gateway" in text]


def test_the_documents_that_are_served_keep_their_descriptions(registry: SchemaRegistry) -> None:
    served = json.loads(registry.documents["system.echo.invoke.output@1.0.0"])
    assert "MUST equal" in served["properties"]["node_id"]["description"]
