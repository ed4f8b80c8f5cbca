"""The documents of a tool: those that its calls are checked by, and those that its entry shows.

Must not know whether a node or the relay answers the tool.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from schemas.registry import SchemaRegistry, Validator


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


def listed_schema(registry: SchemaRegistry, ref: str) -> dict[str, Any]:
    """Return the document ``ref`` as an entry shows it.

    Clients compile all tools' schemas into one validator, which refuses an id that it has seen, and some do
    not know the dialect's URI. ``_meta`` names the schema instead.
    """
    hidden = ("$id", "$schema")
    return {key: value for key, value in registry.document(ref).items() if key not in hidden}
