"""From envelopes, JSON-RPC errors, statuses and faults to the five errors."""

import json
from typing import Any

import pytest
from mcp.shared.exceptions import MCPError
from mcp_types import CallToolResult, TextContent

from relay.client.remote_tools.errors import ERROR_TYPES
from relay.client.remote_tools.failures import FailureTable, of_fault, of_status
from relay.client.remote_tools.servers import WireAttempt
from relay.remote_tools import (
    Reason,
    Redaction,
    RemoteToolError,
    ToolInvalidArguments,
    ToolNotFound,
    ToolProviderFailure,
    ToolTimeout,
    ToolUnauthorized,
)
from schemas.errors import Failure, Retry, ToolError, to_jsonrpc_error

TABLE = FailureTable(Redaction())
ID = "01HZX9K3M4P7Q8R9S0T1V2W3XY"


def result_of(envelope: Any) -> CallToolResult:
    content = [{"type": "text", "text": json.dumps(envelope)}]
    return CallToolResult.model_validate(
        {"isError": True, "content": content, "_meta": {"edge-kubelet/error": envelope}}
    )


def of_jsonrpc(code: int, message: str, data: Any = None, **wire: Any) -> RemoteToolError:
    return TABLE.of_jsonrpc(MCPError(code, message, data), WireAttempt(**wire), idempotent=False)


@pytest.mark.holds(
    "SPEC-0004/3.3/timeout",
    "SPEC-0004/3.3/unauthorized",
    "SPEC-0004/3.3/tool-not-found",
    "SPEC-0004/3.3/invalid-arguments",
    "SPEC-0004/3.3/provider-failure",
)
@pytest.mark.parametrize("idempotent", [True, False])
@pytest.mark.parametrize("failure", Failure, ids=lambda failure: failure.name)
def test_each_row_of_a_relays_table_is_its_remote_tool_error(failure: Failure, *, idempotent: bool) -> None:
    row = failure.value
    envelope = ToolError(failure, retry_after_ms=70).envelope(ID)
    error = TABLE.of_result(result_of(envelope), "echo", idempotent=idempotent)
    assert type(error) is ERROR_TYPES[row.remote_tool]
    assert (error.code, error.suggested_fix, error.remote_correlation_id) == (row.code, row.suggested_fix, ID)
    assert error.retryable is (row.retry is Retry.YES or (row.retry is Retry.IF_IDEMPOTENT and idempotent))
    assert error.may_have_run is (row.retry is Retry.IF_IDEMPOTENT)
    assert error.retry_after_ms == 70


def test_a_detail_of_a_relay_is_kept() -> None:
    envelope = ToolError(Failure.ARGUMENTS_INVALID, "/message violates type").envelope(ID)
    assert "/message violates type" in str(TABLE.of_result(result_of(envelope), "echo", idempotent=False))


@pytest.mark.parametrize(
    "envelope",
    [
        "text",
        {"code": "E_OTHER"},
        {"code": 5},
        {},
        [],
        {"code": "E_NODE_OFFLINE", "message": 5, "retry_after_ms": "x", "correlation_id": "a\x1b"},
        {"code": "E_NODE_OFFLINE", "retry_after_ms": -1, "correlation_id": "A" * 65},
        {"code": "E_NODE_OFFLINE", "retry_after_ms": True, "correlation_id": 5},
        {"code": "E_NODE_OFFLINE", "correlation_id": "\u0661\u00e9"},
    ],
    ids=str,
)
def test_an_envelope_that_is_malformed_is_still_one_error(envelope: Any) -> None:
    error = TABLE.of_result(result_of(envelope), "echo", idempotent=False)
    assert isinstance(error, ToolProviderFailure)
    assert (error.remote_correlation_id, error.retry_after_ms) == (None, None)
    assert str(error).isprintable()


@pytest.mark.parametrize(
    ("canonical", "expected"),
    [
        ("INVALID_INPUT", ToolInvalidArguments),
        ("NOT_FOUND", ToolNotFound),
        ("TIMEOUT", ToolProviderFailure),
        ("UNAUTHORIZED", ToolUnauthorized),
        ("INTERNAL_ERROR", ToolProviderFailure),
    ],
)
def test_a_relays_jsonrpc_error_has_the_type_of_its_canonical_code(
    canonical: str, expected: type[RemoteToolError]
) -> None:
    document = to_jsonrpc_error(canonical)
    error = of_jsonrpc(document["code"], document["message"], document["data"], status=400)
    assert (type(error), error.code, error.retryable) == (expected, document["code"], False)


def test_a_refusal_outside_of_a_call_is_about_the_credential() -> None:
    document = to_jsonrpc_error("UNAUTHORIZED")
    error = of_jsonrpc(document["code"], document["message"], document["data"], status=401)
    assert error.suggested_fix.startswith("Check the credential")
    assert not error.may_have_run


@pytest.mark.parametrize("canonical", [[], {}, 1, None, True, "OTHER"], ids=str)
def test_a_canonical_code_that_is_none_is_ignored(canonical: object) -> None:
    error = of_jsonrpc(-32603, "It broke.", {"canonical": canonical})
    assert (type(error), error.code) == (ToolProviderFailure, -32603)


@pytest.mark.parametrize(
    ("code", "message", "expected", "reason"),
    [
        (-32601, "Method not found", ToolNotFound, Reason.JSONRPC_ERROR),
        (-32602, "Unknown tool: x", ToolNotFound, Reason.JSONRPC_ERROR),
        (-32602, "MCP error -32602: Tool x not found", ToolNotFound, Reason.JSONRPC_ERROR),
        (-32602, "the colour is not known", ToolInvalidArguments, Reason.JSONRPC_ERROR),
        (-32001, "Request timed out", ToolTimeout, Reason.JSONRPC_ERROR),
        (-32000, "Connection closed", ToolProviderFailure, Reason.CONNECTION_LOST),
        (-32000, "SSE stream ended without a response", ToolProviderFailure, Reason.CONNECTION_LOST),
        (-32000, "out of memory", ToolProviderFailure, Reason.JSONRPC_ERROR),
        (-32700, "Failed to parse", ToolProviderFailure, Reason.PROTOCOL),
        (-32603, "Internal error", ToolProviderFailure, Reason.JSONRPC_ERROR),
        (12345, "\x1b[2J", ToolProviderFailure, Reason.JSONRPC_ERROR),
    ],
)
def test_each_code_of_another_server_is_a_typed_error(
    code: int, message: str, expected: type[RemoteToolError], reason: Reason
) -> None:
    error = of_jsonrpc(code, message, status=200)
    assert (type(error), error.reason, error.retryable) == (expected, reason, False)
    assert str(error).isprintable()


@pytest.mark.holds("SPEC-0004/3.3/timeout")
@pytest.mark.parametrize(
    ("status", "expected", "retryable"),
    [
        (400, ToolProviderFailure, False),
        (401, ToolUnauthorized, False),
        (403, ToolUnauthorized, False),
        (404, ToolProviderFailure, False),
        (408, ToolTimeout, True),
        (429, ToolProviderFailure, True),
        (500, ToolProviderFailure, True),
        (502, ToolProviderFailure, True),
        (503, ToolProviderFailure, True),
        (504, ToolTimeout, True),
        (501, ToolProviderFailure, False),
        (524, ToolProviderFailure, True),
    ],
)
def test_each_status_is_a_typed_error(
    status: int, expected: type[RemoteToolError], *, retryable: bool
) -> None:
    error = of_status(status, WireAttempt(), idempotent=True)
    assert (type(error), error.retryable, error.code) == (expected, retryable, status)
    # Only a server that limits the rate certainly did nothing.
    assert of_status(status, WireAttempt(), idempotent=False).retryable is (status == 429)


def test_a_status_counts_more_than_the_stand_in_of_the_sdk_and_less_than_a_servers_own_error() -> None:
    stand_in = of_jsonrpc(-32603, "Server returned an error response", status=502)
    assert stand_in.code == 502
    own = of_jsonrpc(-32602, "the colour is not known", status=400)
    assert (type(own), own.code) == (ToolInvalidArguments, -32602)
    refused = of_jsonrpc(-32000, "no token", status=401)
    assert isinstance(refused, ToolUnauthorized)


@pytest.mark.parametrize(
    "fault",
    list(
        map(Reason, ("credential", "unreachable", "connection_lost", "second_send", "too_large", "protocol"))
    ),
)
def test_a_fault_below_http_is_never_repeated_for_a_tool_that_may_have_run(fault: Reason) -> None:
    error = of_fault(fault, WireAttempt(), idempotent=False)
    assert error.reason is fault
    assert not (error.retryable and error.may_have_run)
    assert error.suggested_fix


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Unknown tool: echo", ToolNotFound),
        ("MCP error -32602: Tool echo disabled", ToolNotFound),
        ("Input validation error: 'x' is not of type 'string'", ToolInvalidArguments),
        ("MCP error -32602: Invalid arguments for tool echo: too many", ToolInvalidArguments),
        (
            "Error executing tool echo: 2 validation errors for echoArguments\nn\n  wrong",
            ToolInvalidArguments,
        ),
        ("Unknown tool: another", ToolProviderFailure),
        ("Unknown tool: echo, said the tool", ToolProviderFailure),
        ("Error executing tool echo: 2 validation errors for Order\nn", ToolProviderFailure),
        ("2 validation errors for echoArguments\nn", ToolProviderFailure),
    ],
)
def test_what_the_official_sdks_put_into_a_result_is_recognised(
    text: str, expected: type[RemoteToolError]
) -> None:
    result = CallToolResult(content=[TextContent(text=text)], is_error=True)
    error = TABLE.of_result(result, "echo", idempotent=True)
    # The tool itself may have written it: no promise follows from a text.
    assert (type(error), error.may_have_run, error.retryable) == (expected, True, False)


WORDS = {"timeout", "unauthorized", "tool_not_found", "invalid_arguments", "provider_failure"}


def test_there_is_one_type_for_each_word_of_the_specification_and_of_the_table() -> None:
    assert set(ERROR_TYPES) == WORDS
    assert {failure.value.remote_tool for failure in Failure} <= WORDS
    assert set(ERROR_TYPES.values()) == set(RemoteToolError.__subclasses__())


def test_an_error_of_a_local_check_states_that_nothing_ran() -> None:
    error = ERROR_TYPES["unauthorized"]("No.", reason=Reason.RISK, suggested_fix="Ask.")
    assert (error.may_have_run, error.retryable, error.code, error.correlation_id) == (False, False, None, "")
    assert str(error) == "No."
