"""The two documents that validate every call, and the same rules written in Python."""

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.registry import SchemaRegistry
from schemas.violations import ViolationError
from tests.fakes.examples import examples
from tests.fakes.schema_values import anything, nearly_fitting
from tests.fakes.signer import NODE_ID

REGISTRY = SchemaRegistry()
ENVELOPE = REGISTRY.load_envelope()
TOOL_IO = REGISTRY.load("tool_io@1.0.0")
MANY = examples(20, 200)

CALL: dict[str, Any] = {
    "id": 1,
    "jsonrpc": "2.0",
    "method": "tools/call",
    "params": {"name": f"sysecho.{NODE_ID}.echo.invoke", "arguments": {"message": "ping"}},
}
IO: dict[str, Any] = {"tool": f"mcp.tool:sysecho.{NODE_ID}.echo.invoke", "input": {"message": "ping"}}

GOOD_ENVELOPES: dict[str, dict[str, Any]] = {
    "the least": CALL,
    "all that there may be": {**CALL, "meta": {"any": ["thing"]}, "idempotencyKey": "k"},
    "an id that is a text": {**CALL, "id": "a"},
    "an id that is an empty text": {**CALL, "id": ""},
    "an id of zero": {**CALL, "id": 0},
    "an id below zero": {**CALL, "id": -1},
    "an id of 2^53-1": {**CALL, "id": 2**53 - 1},
    "an id of 1.0, which JSON calls an integer": {**CALL, "id": 1.0},
    "a method of one character": {**CALL, "method": "m"},
    "a method that MCP does not know": {**CALL, "method": "tools/cal"},
    "empty params": {**CALL, "params": {}},
    "an empty meta": {**CALL, "meta": {}},
    "a key of 128 characters": {**CALL, "idempotencyKey": "k" * 128},
    "a key of 128 characters that are 512 bytes": {**CALL, "idempotencyKey": "\U0001f600" * 128},
}
# Where, and which rule: so that nothing is refused for another reason than the one it is here for.
BAD_ENVELOPES: dict[str, tuple[Any, str]] = {
    "no id": ({name: CALL[name] for name in CALL if name != "id"}, "/ violates required"),
    "no jsonrpc": ({name: CALL[name] for name in CALL if name != "jsonrpc"}, "/ violates required"),
    "no method": ({name: CALL[name] for name in CALL if name != "method"}, "/ violates required"),
    "no params": ({name: CALL[name] for name in CALL if name != "params"}, "/ violates required"),
    "an id of null": ({**CALL, "id": None}, "/id violates type"),
    "an id of true": ({**CALL, "id": True}, "/id violates type"),
    "an id of 1.5": ({**CALL, "id": 1.5}, "/id violates type"),
    "an id that is no number": ({**CALL, "id": math.nan}, "/id violates type"),
    "an id that is a list": ({**CALL, "id": [1]}, "/id violates type"),
    "an id that is an object": ({**CALL, "id": {}}, "/id violates type"),
    "another version": ({**CALL, "jsonrpc": "1.0"}, "/jsonrpc violates const"),
    "a version that is a number": ({**CALL, "jsonrpc": 2.0}, "/jsonrpc violates const"),
    "a version and a line feed": ({**CALL, "jsonrpc": "2.0\n"}, "/jsonrpc violates const"),
    "a version of null": ({**CALL, "jsonrpc": None}, "/jsonrpc violates const"),
    "an empty method": ({**CALL, "method": ""}, "/method violates minLength"),
    "a method that is a number": ({**CALL, "method": 1}, "/method violates type"),
    "params that are a list": ({**CALL, "params": []}, "/params violates type"),
    "params that are null": ({**CALL, "params": None}, "/params violates type"),
    "params that are a text": ({**CALL, "params": "{}"}, "/params violates type"),
    "a meta that is null": ({**CALL, "meta": None}, "/meta violates type"),
    "a meta that is a list": ({**CALL, "meta": []}, "/meta violates type"),
    "an empty key": ({**CALL, "idempotencyKey": ""}, "/idempotencyKey violates minLength"),
    "a key of 129 characters": ({**CALL, "idempotencyKey": "k" * 129}, "/idempotencyKey violates maxLength"),
    "a key that is a number": ({**CALL, "idempotencyKey": 1}, "/idempotencyKey violates type"),
    "a key of null": ({**CALL, "idempotencyKey": None}, "/idempotencyKey violates type"),
    "a member that is not known": ({**CALL, "auth": "x"}, "/ violates additionalProperties"),
    "MCP's own meta at the top": ({**CALL, "_meta": {}}, "/ violates additionalProperties"),
    "a key by another spelling": ({**CALL, "idempotencykey": "k"}, "/ violates additionalProperties"),
    "a result as well": ({**CALL, "result": {}}, "/ violates additionalProperties"),
    "a batch": ([CALL], "/ violates type"),
    "null": (None, "/ violates type"),
    "a text": ("tools/call", "/ violates type"),
}
GOOD_TOOL_IOS: dict[str, dict[str, Any]] = {
    "the least": IO,
    "all that there may be": {**IO, "version": {"major": 1, "minor": 2, "patch": 3}, "metadata": {"a": [1]}},
    "empty input and metadata": {**IO, "input": {}, "metadata": {}},
    "a major version alone": {**IO, "version": {"major": 0}},
    "a patch without a minor version": {**IO, "version": {"major": 1, "patch": 0}},
    "a version of 1.0, which JSON calls an integer": {**IO, "version": {"major": 1.0}},
    "a tool of one character": {**IO, "tool": "mcp.tool:a"},
    "a tool that is called as the prefix is": {**IO, "tool": "mcp.tool:mcp.tool:"},
    "a tool that is no text of ours": {**IO, "tool": "mcp.tool:\u202e\r\u2028"},
}
BAD_TOOL_IOS: dict[str, tuple[Any, str]] = {
    "no tool": ({"input": {}}, "/ violates required"),
    "no input": ({"tool": IO["tool"]}, "/ violates required"),
    "an empty tool": ({**IO, "tool": ""}, "/tool violates pattern"),
    "nothing behind the prefix": ({**IO, "tool": "mcp.tool:"}, "/tool violates pattern"),
    "a line feed behind the prefix": ({**IO, "tool": "mcp.tool:\n"}, "/tool violates pattern"),
    "a line feed at the end": ({**IO, "tool": "mcp.tool:a\n"}, "/tool violates pattern"),
    "a carriage return and a line feed at the end": (
        {**IO, "tool": "mcp.tool:a\r\n"},
        "/tool violates pattern",
    ),
    "a line feed inside": ({**IO, "tool": "mcp.tool:a\nb"}, "/tool violates pattern"),
    "a line feed before": ({**IO, "tool": "\nmcp.tool:a"}, "/tool violates pattern"),
    "a space before": ({**IO, "tool": " mcp.tool:a"}, "/tool violates pattern"),
    "the prefix on a second line": ({**IO, "tool": "x\nmcp.tool:a"}, "/tool violates pattern"),
    "a prefix in upper case": ({**IO, "tool": "MCP.TOOL:a"}, "/tool violates pattern"),
    "a prefix with another dot": ({**IO, "tool": "mcp-tool:a"}, "/tool violates pattern"),
    "no prefix": ({**IO, "tool": "sysecho"}, "/tool violates pattern"),
    "a tool of null": ({**IO, "tool": None}, "/tool violates type"),
    "a tool that is a list": ({**IO, "tool": [IO["tool"]]}, "/tool violates type"),
    "input of null": ({**IO, "input": None}, "/input violates type"),
    "input that is a list": ({**IO, "input": []}, "/input violates type"),
    "input that is a text": ({**IO, "input": "{}"}, "/input violates type"),
    "a version without a major one": ({**IO, "version": {"minor": 1}}, "/version violates required"),
    "an empty version": ({**IO, "version": {}}, "/version violates required"),
    "a major version below zero": ({**IO, "version": {"major": -1}}, "/version/major violates minimum"),
    "a minor version below zero": (
        {**IO, "version": {"major": 1, "minor": -1}},
        "/version/minor violates minimum",
    ),
    "a patch below zero": ({**IO, "version": {"major": 1, "patch": -1}}, "/version/patch violates minimum"),
    "a major version of 1.5": ({**IO, "version": {"major": 1.5}}, "/version/major violates type"),
    "a major version of true": ({**IO, "version": {"major": True}}, "/version/major violates type"),
    "a major version that is a text": ({**IO, "version": {"major": "1"}}, "/version/major violates type"),
    "a version with a build": (
        {**IO, "version": {"major": 1, "build": 1}},
        "/version violates additionalProperties",
    ),
    "a version that is a text": ({**IO, "version": "1.0.0"}, "/version violates type"),
    "a version of null": ({**IO, "version": None}, "/version violates type"),
    "metadata that are a list": ({**IO, "metadata": []}, "/metadata violates type"),
    "metadata of null": ({**IO, "metadata": None}, "/metadata violates type"),
    "an output as well": ({**IO, "output": {}}, "/ violates additionalProperties"),
    "a list": ([IO], "/ violates type"),
    "null": (None, "/ violates type"),
}


@pytest.mark.holds("ENVELOPE/envelope-schema")
@pytest.mark.parametrize("name", GOOD_ENVELOPES)
def test_a_good_envelope_is_taken(name: str) -> None:
    ENVELOPE.check(GOOD_ENVELOPES[name])


@pytest.mark.holds("ENVELOPE/envelope-schema")
@pytest.mark.parametrize("name", BAD_ENVELOPES)
def test_a_bad_envelope_is_refused_for_its_one_reason(name: str) -> None:
    value, reason = BAD_ENVELOPES[name]
    with pytest.raises(ViolationError) as caught:
        ENVELOPE.check(value)
    assert str(caught.value) == reason
    assert not ENVELOPE.is_valid(value)


@pytest.mark.holds("ENVELOPE/tool-io-schema")
@pytest.mark.parametrize("name", GOOD_TOOL_IOS)
def test_a_good_tool_io_is_taken(name: str) -> None:
    TOOL_IO.check(GOOD_TOOL_IOS[name])


@pytest.mark.holds("ENVELOPE/tool-io-schema")
@pytest.mark.parametrize("name", BAD_TOOL_IOS)
def test_a_bad_tool_io_is_refused_for_its_one_reason(name: str) -> None:
    value, reason = BAD_TOOL_IOS[name]
    with pytest.raises(ViolationError) as caught:
        TOOL_IO.check(value)
    assert str(caught.value) == reason
    assert not TOOL_IO.is_valid(value)


def is_text(value: Any, least: int = 0, most: int = 1 << 30) -> bool:
    return isinstance(value, str) and least <= len(value) <= most


def is_integer(value: Any) -> bool:
    if isinstance(value, float):
        return value.is_integer()
    return isinstance(value, int) and not isinstance(value, bool)


def is_envelope(value: Any) -> bool:
    """Check in Python what the document requires."""
    if not isinstance(value, dict) or not {"id", "jsonrpc", "method", "params"} <= set(value):
        return False
    return (
        set(value) <= {"id", "jsonrpc", "method", "params", "meta", "idempotencyKey"}
        and (is_text(value["id"]) or is_integer(value["id"]))
        and value["jsonrpc"] == "2.0"
        and is_text(value["method"], 1)
        and isinstance(value["params"], dict)
        and isinstance(value.get("meta", {}), dict)
        and is_text(value.get("idempotencyKey", "k"), 1, 128)
    )


def is_version(value: Any) -> bool:
    if not isinstance(value, dict) or "major" not in value:
        return False
    return set(value) <= {"major", "minor", "patch"} and all(
        is_integer(number) and number >= 0 for number in value.values()
    )


def is_tool_io(value: Any) -> bool:
    """Check in Python what the document requires."""
    if not isinstance(value, dict) or not {"tool", "input"} <= set(value):
        return False
    tool = value["tool"]
    return (
        set(value) <= {"tool", "input", "version", "metadata"}
        and is_text(tool, len("mcp.tool:") + 1)
        and tool.startswith("mcp.tool:")
        and "\n" not in tool
        and isinstance(value["input"], dict)
        and is_version(value.get("version", {"major": 0}))
        and isinstance(value.get("metadata", {}), dict)
    )


def is_readable(value: Any) -> bool:
    """Return whether every text in ``value`` is one: the strict parser rejects lone surrogates."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True


def holds_for_envelope(value: Any) -> None:
    # Of a text that is none the rules may say either, but must not break.
    assert ENVELOPE.is_valid(value) == is_envelope(value) or not is_readable(value)


def holds_for_tool_io(value: Any) -> None:
    assert TOOL_IO.is_valid(value) == is_tool_io(value) or not is_readable(value)


@pytest.mark.holds("ENVELOPE/envelope-schema")
@given(value=nearly_fitting(REGISTRY, "envelope@1.0.0"))
@MANY
def test_the_document_says_of_what_is_nearly_an_envelope_what_plain_code_says(value: Any) -> None:
    holds_for_envelope(value)


@pytest.mark.holds("ENVELOPE/tool-io-schema")
@given(value=nearly_fitting(REGISTRY, "tool_io@1.0.0"))
@MANY
def test_the_document_says_of_what_is_nearly_a_tool_io_what_plain_code_says(value: Any) -> None:
    holds_for_tool_io(value)


@given(value=anything, name=st.sampled_from([*GOOD_ENVELOPES["all that there may be"], "other"]))
@MANY
def test_any_value_in_any_place_of_an_envelope_is_judged_as_plain_code_does(value: Any, name: str) -> None:
    holds_for_envelope({**CALL, name: value})


@given(value=anything, name=st.sampled_from([*GOOD_TOOL_IOS["all that there may be"], "other"]))
@MANY
def test_any_value_in_any_place_of_a_tool_io_is_judged_as_plain_code_does(value: Any, name: str) -> None:
    holds_for_tool_io({**IO, name: value})


@given(text=st.text(st.characters(), max_size=4))
@MANY
def test_what_stands_behind_the_prefix_is_a_tool_unless_it_is_empty_or_breaks_the_line(text: str) -> None:
    holds_for_tool_io({**IO, "tool": f"mcp.tool:{text}"})


@given(value=anything)
@MANY
def test_whatever_comes_is_judged_and_never_breaks_the_judge(value: Any) -> None:
    holds_for_envelope(value)
    holds_for_tool_io(value)
