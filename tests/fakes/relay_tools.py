"""Tools that the relay answers itself, made for tests."""

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from relay.calls.relay_tools import RelayTool, RelayToolCall
from relay.fleet.tools import ToolSchemas
from schemas.registry import SchemaRegistry

Answer = Callable[[RelayToolCall], Awaitable[Mapping[str, Any]]]

INPUT_REF = "system.echo.invoke.input@1.0.0"
NODE_FREE = {"message": "ping", "received_at_ms": 1_760_000_000_000, "node_id": "0" * 26}
"""A result that fits the output of ``parrot``, without a node."""


async def repeated(call: RelayToolCall) -> Mapping[str, Any]:
    """Answer with the message of the call."""
    return {**NODE_FREE, "message": call.arguments["message"]}


def parrot(registry: SchemaRegistry, answer: Answer = repeated, **members: Any) -> RelayTool:
    """Return a tool with the documents of ``system.echo``."""
    usual: dict[str, Any] = {
        "canonical": "relay.parrot",
        "title": "Parrot",
        "description": "Repeats a message.",
        "schemas": ToolSchemas.of(registry, INPUT_REF, "system.echo.invoke.output@1.0.0"),
        "schema_ref": INPUT_REF,
        "safety_class": "read_only",
        "idempotent": True,
        "visible": lambda rights: rights.may_read,
        "answer": answer,
    }
    return RelayTool(**(usual | members))
