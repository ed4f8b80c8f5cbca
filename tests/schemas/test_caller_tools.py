import math
from typing import Any

import pytest

from schemas.caller_tools import (
    MAX_ERROR_TEXT,
    MAX_TOOLS,
    MAX_TOOLS_BYTES,
    MAX_VALUE_BYTES,
    CallerToolError,
    size_of,
)
from schemas.frames import MAX_FRAME_BYTES
from schemas.registry import SchemaRegistry

ENVELOPE_BYTES = 8192


def payload(registry: SchemaRegistry, frame: str) -> dict[str, Any]:
    document: dict[str, Any] = registry.document(f"session.{frame}@1.0.0")["properties"]["payload"]
    return document


def test_a_value_is_as_large_as_it_travels() -> None:
    assert size_of({"a": [1, "\u20ac"]}) == len('{"a":[1,"\\u20ac"]}')


def test_what_json_cannot_express_has_no_size() -> None:
    with pytest.raises(ValueError, match="Out of range"):
        size_of(math.nan)


def test_the_largest_values_leave_space_in_a_frame() -> None:
    assert max(MAX_VALUE_BYTES, MAX_TOOLS_BYTES) + ENVELOPE_BYTES <= MAX_FRAME_BYTES


def test_every_error_of_a_request_is_in_the_document_and_has_a_row(registry: SchemaRegistry) -> None:
    document = payload(registry, "caller_tool_result")
    stated = document["oneOf"][1]["properties"]["error"]["properties"]
    assert stated["code"]["enum"] == [error.value for error in CallerToolError]
    assert stated["message"]["maxLength"] == MAX_ERROR_TEXT
    assert len({error.failure for error in CallerToolError}) == len(CallerToolError)


def test_a_session_has_as_many_tools_as_its_document_admits(registry: SchemaRegistry) -> None:
    document = payload(registry, "session_open")
    assert document["properties"]["tools"]["maxItems"] == MAX_TOOLS
