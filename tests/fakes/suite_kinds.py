"""What the official conformance suite expects of a server's tools, as kinds, documents and handlers of ours.

Two kinds that only tests know, and a contract that admits them beside those that ship. Only what a node can
really do is here: a result is one JSON object that fits a document. Must not be known to anything that ships.
"""

import json
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from kubelet.handlers.base import Handler
from schemas.document_store import SCHEME
from schemas.kinds import MANIFEST_REF, Kind, KindRegistry, Verb
from schemas.projection import NODE_ID_PATTERN, ToolName
from schemas.registry import SchemaRegistry
from tests.fakes.documents import write_contract
from tests.fakes.shipped_kinds import KINDS

DIALECT: Final = "https://json-schema.org/draft/2020-12/schema"
SIMPLE_TEXT: Final = "This is a simple text response for testing."
ERROR_TEXT: Final = "This tool intentionally returns an error for testing"

_TEXT_INPUT: Final = "test.text.invoke.input@1.0.0"
_SCHEMA_INPUT: Final = "test.schema.invoke.input@1.0.0"
_OUTPUT: Final = "test.invoke.output@1.0.0"

_DOCUMENTS: Final[Mapping[str, Mapping[str, Any]]] = {
    _TEXT_INPUT: {"type": "object", "additionalProperties": False},
    # As the suite's scenario json-schema-2020-12 writes it.
    _SCHEMA_INPUT: {
        "type": "object",
        "$defs": {
            "address": {
                "$anchor": "addressDef",
                "type": "object",
                "properties": {"street": {"type": "string"}, "city": {"type": "string"}},
            }
        },
        "properties": {
            "name": {"type": "string"},
            "address": {"$ref": "#/$defs/address"},
            "contactMethod": {"type": "string", "enum": ["phone", "email"]},
            "phone": {"type": "string"},
            "email": {"type": "string"},
        },
        "allOf": [{"anyOf": [{"required": ["phone"]}, {"required": ["email"]}]}],
        "if": {"properties": {"contactMethod": {"const": "phone"}}, "required": ["contactMethod"]},
        "then": {"required": ["phone"]},
        "else": {"required": ["email"]},
        "additionalProperties": False,
    },
    _OUTPUT: {
        "type": "object",
        "additionalProperties": False,
        "required": ["node_id", "text"],
        "properties": {
            "node_id": {"type": "string", "pattern": f"^{NODE_ID_PATTERN}$"},
            "text": {"type": "string", "maxLength": 256},
        },
    },
}


def _kind(name: str, short: str, input_ref: str) -> Kind:
    verb = Verb(
        "invoke", input_ref, _OUTPUT, "A tool of the suite", "Used by the suite only.", idempotent=True
    )
    # The tokens sort after those of the kinds that ship, whose tools the suite takes when any tool will do.
    return Kind(name, short, "read_only", SCHEME + input_ref, MappingProxyType({verb.name: verb}))


_TEXT: Final = _kind("test.text", "testtext", _TEXT_INPUT)
_SCHEMA: Final = _kind("test.schema", "testjson", _SCHEMA_INPUT)

# The suite's names, and what they are here: a kind and a capability.
_TOOLS: Final[Mapping[str, tuple[Kind, str]]] = {
    "json_schema_2020_12_tool": (_SCHEMA, "json_schema"),
    "test_error_handling": (_TEXT, "error_handling"),
    "test_logging_tool": (_TEXT, "logging_tool"),
    "test_simple_text": (_TEXT, "simple_text"),
    "test_streaming_elicitation": (_TEXT, "streaming"),
    "test_trigger_tool_change": (_TEXT, "tool_change"),
}


def write_documents(directory: Path) -> None:
    """Write the documents that ship into ``directory``, amended, and those of the suite's kinds."""
    write_contract(directory)
    for ref, document in _DOCUMENTS.items():
        _write(directory, {"$schema": DIALECT, "$id": SCHEME + ref, **document})
    manifest = SchemaRegistry(directory).document(MANIFEST_REF)
    capability = manifest["$defs"]["Capability"]
    for kind in (_TEXT, _SCHEMA):
        capability["properties"]["kind"]["enum"].append(kind.name)
        clamp = {"safety_class": {"const": "read_only"}, "verbs": {"items": {"enum": ["invoke"]}}}
        capability["allOf"].append(
            {"if": {"properties": {"kind": {"const": kind.name}}}, "then": {"properties": clamp}}
        )
    _write(directory, manifest)


def _write(directory: Path, document: Mapping[str, Any]) -> None:
    ref = str(document["$id"]).removeprefix(SCHEME)
    (directory / f"{ref}.json").write_text(json.dumps(document), "utf-8")


def kinds_with_the_suites() -> KindRegistry:
    """Return the kinds that ship and the suite's."""
    return KindRegistry([*KINDS, _TEXT, _SCHEMA])


def suite_names(node_id: str) -> dict[str, str]:
    """Return the canonical name, on ``node_id``, of each tool by the suite's name for it."""
    return {
        name: ToolName(kind.short, node_id, cap_id, "invoke").canonical
        for name, (kind, cap_id) in _TOOLS.items()
    }


class SuiteTool(Handler):
    """One tool of the suite's. ``act`` returns its text; ``runs`` counts how often it was run."""

    def __init__(self, name: str, node_id: str, act: Callable[[], Awaitable[str]]) -> None:
        self.name = name
        self.runs = 0
        self._node_id = node_id
        self._act = act

    @property
    def capability(self) -> Mapping[str, Any]:
        """The capability as the manifest has it."""
        kind, cap_id = _TOOLS[self.name]
        return {
            "cap_id": cap_id,
            "kind": kind.name,
            "schema_ref": kind.schema_ref,
            "verbs": ["invoke"],
            "safety_class": kind.safety_class,
            "constraints": {"rate_limit_rps": 100, "max_concurrency": 4, "deadline_ms_default": 2000},
        }

    async def invoke(self, verb: str, arguments: Mapping[str, Any]) -> dict[str, Any]:  # noqa: ARG002 - one verb
        """Return ``{node_id, text}``."""
        self.runs += 1
        return {"node_id": self._node_id, "text": await self._act()}


def suite_tools(node_id: str, change_the_list: Callable[[], Awaitable[None]]) -> list[SuiteTool]:
    """Return every tool of the suite's for ``node_id``; one of them calls ``change_the_list``."""

    async def say() -> str:
        return SIMPLE_TEXT

    async def fail() -> str:
        raise RuntimeError(ERROR_TEXT)

    async def change() -> str:
        await change_the_list()
        return "The list has changed."

    acts = {"test_error_handling": fail, "test_trigger_tool_change": change}
    return [SuiteTool(name, node_id, acts.get(name, say)) for name in _TOOLS]
