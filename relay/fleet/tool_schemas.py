"""The documents of a tool: those that its calls are checked by, and those that its entry shows.

Must not know whether a node or the relay answers the tool.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from schemas.registry import SchemaRegistry, Validator, listed_schema


@dataclass(frozen=True, slots=True)
class ToolSchemas:
    """The input and the output of a tool, each compiled and as it is listed."""

    arguments: Validator
    result: Validator
    input_schema: Mapping[str, Any]
    output_schema: Mapping[str, Any]

    @classmethod
    def of(cls, registry: SchemaRegistry, input_ref: str, output_ref: str) -> "ToolSchemas":
        """Return the documents of the registry by their references.

        Raises:
            KeyError: there is no such document.
        """
        return cls(
            arguments=registry.load(input_ref),
            result=registry.load(output_ref),
            input_schema=listed_schema(registry, input_ref),
            output_schema=listed_schema(registry, output_ref),
        )
