"""The schemas of the kinds view's tools: those of the verb, with the nodes to ask and their answers.

One object each, without ``oneOf`` or ``anyOf`` at its root, which several models' APIs refuse: which members
go together is checked in code (``kind_tools``). Must not know a kind by name.
"""

from collections.abc import Mapping
from typing import Any

from relay.fleet.tool_schemas import ToolSchemas
from schemas.kinds import Verb
from schemas.listed_schemas import listed_schema
from schemas.registry import SchemaRegistry

INPUT_REF = "kind_call.input@1.0.0"
OUTPUT_REF = "kind_call.output@1.0.0"
NODES = "nodes"

# Of the root of a verb's output, what is true of both forms of an answer.
_KEPT = ("title", "description", "additionalProperties", "$defs")


def kind_schemas(registry: SchemaRegistry, verb: Verb, *, takes_many: bool) -> ToolSchemas:
    """Return the schemas of the tool for ``verb``; ``takes_many``: whether it can ask several nodes.

    Raises:
        ValueError: the verb has a member of the same name as one of the kinds view's.
    """
    own_input, own_output = (listed_schema(registry, ref) for ref in (verb.input_ref, verb.output_ref))
    chosen, answers = listed_schema(registry, INPUT_REF), listed_schema(registry, OUTPUT_REF)
    if not takes_many:
        del chosen["properties"][NODES]
        answers["properties"] = {}
    else:
        results = answers["properties"]["results"]["items"]["properties"]
        results["result"] = {key: value for key, value in own_output.items() if key != "$defs"}
    return ToolSchemas(
        arguments=registry.load(INPUT_REF),
        result=registry.load(OUTPUT_REF),
        input_schema={**own_input, "properties": _together(chosen, own_input, verb)},
        # Nothing is required at the root: the members of one form are not those of the other.
        output_schema={
            "type": "object",
            **{key: own_output[key] for key in _KEPT if key in own_output},
            "properties": _together(own_output, answers, verb),
        },
    )


def _together(first: Mapping[str, Any], second: Mapping[str, Any], verb: Verb) -> dict[str, Any]:
    one, other = first.get("properties", {}), second.get("properties", {})
    if both := one.keys() & other.keys():
        raise ValueError(f"{verb.name}: the members {sorted(both)} have a meaning in the kinds view")
    return {**one, **other}
