"""The schemas of the kinds view's tools: those of the verb, with the nodes to ask and their answers.

One object each, without ``oneOf`` or ``anyOf`` at its root, which several models' APIs refuse: which members
go together is checked in code (``kind_tools``). Must not know a kind by name.
"""

from collections.abc import Collection, Mapping
from typing import Any

from relay.fleet.tool_schemas import ToolSchemas
from schemas.kinds import Verb
from schemas.registry import SchemaRegistry, listed_schema
from schemas.times import moments_of

NODES = "nodes"
FOR_S = "for_s"
QUERY = frozenset({"sort", "where", "top", "fields", "cursor"})

_FIRST, _SECOND = "1.0.0", "1.1.0"
"""The versions of this view's documents. A verb may have members of the names that came with the second."""
_CHOOSING = frozenset({"node", "capability"})
_ANSWERS = frozenset({"results", "asked", "answered", "failed", "truncated"})
_OF_QUERY = frozenset({"matched", "lacking", "failures", "next"})

# Of the root of a verb's output, what is true of both forms of an answer.
_KEPT = ("title", "description", "additionalProperties", "$defs")


def kind_schemas(registry: SchemaRegistry, verb: Verb, *, takes_many: bool) -> ToolSchemas:
    """Return the schemas of the tool for ``verb``; ``takes_many``: whether it can ask several nodes.

    A verb with a member of the same name as one to follow or to query by is served without these.

    Raises:
        ValueError: the verb has a member of the same name as another one of the kinds view's.
    """
    own_input, own_output = (listed_schema(registry, ref) for ref in (verb.input_ref, verb.output_ref))
    dated = _dated(own_output)
    choosing, answers = _CHOOSING | ({NODES} if takes_many else set()), _ANSWERS if takes_many else set()
    extra_choosing = (QUERY if takes_many else set()) | ({FOR_S} if verb.streams else set())
    extra_answers = (_OF_QUERY if takes_many else set()) | ({"followed"} if verb.streams else set())
    version = _FIRST
    if not (_members(own_input) & extra_choosing or _members(own_output) & extra_answers):
        version, choosing, answers = _SECOND, choosing | extra_choosing, answers | extra_answers
    input_ref, output_ref = f"kind_call.input@{version}", f"kind_call.output@{version}"
    asked, answered = listed_schema(registry, input_ref), listed_schema(registry, output_ref)
    of_each = answered["properties"]["results"]["items"]["properties"]
    of_each["result"] = {key: value for key, value in dated.items() if key != "$defs"}
    return ToolSchemas(
        arguments=registry.load(input_ref),
        result=registry.load(output_ref),
        input_schema={**own_input, "properties": _together(_only(asked, choosing), own_input, verb)},
        # Nothing is required at the root: the members of one form are not those of the other.
        output_schema={
            "type": "object",
            **{key: dated[key] for key in _KEPT if key in dated},
            "properties": _together(dated, _only(answered, answers), verb),
        },
    )


def _members(schema: Mapping[str, Any]) -> frozenset[str]:
    return frozenset(schema.get("properties", {}))


def _dated(output: Mapping[str, Any]) -> dict[str, Any]:
    """Return the schema of a verb's output with the ISO form of its times beside them."""
    moments, properties = moments_of(output), dict[str, Any]()
    for name, rules in output.get("properties", {}).items():
        properties[name] = rules
        if name in moments:
            properties[moments[name]] = {"type": "string"}
    return {**output, "properties": properties} if properties else dict(output)


def _only(schema: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    properties = {name: rules for name, rules in schema["properties"].items() if name in names}
    return {**schema, "properties": properties}


def _together(first: Mapping[str, Any], second: Mapping[str, Any], verb: Verb) -> dict[str, Any]:
    one, other = first.get("properties", {}), second.get("properties", {})
    if both := one.keys() & other.keys():
        raise ValueError(f"{verb.name}: the members {sorted(both)} have a meaning in the kinds view")
    return {**one, **other}
