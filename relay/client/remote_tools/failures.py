"""From what a server, the SDK or the network did to one of the five errors.

A relay of this project is recognised by its error envelope, whose codes the one table of ``schemas.errors``
explains. Must not pass on a server's text unless it is printable, short and redacted.
"""

import re
from collections.abc import Mapping
from typing import Any

from mcp.shared.exceptions import MCPError
from mcp_types import CONNECTION_CLOSED, INVALID_PARAMS, PARSE_ERROR, CallToolResult, TextContent

from relay.client.remote_tools.connection import NotConnectedError
from relay.client.remote_tools.errors import (
    ERROR_TYPES,
    Reason,
    RemoteToolError,
    ToolInvalidArguments,
    ToolNotFound,
    ToolProviderFailure,
    ToolTimeout,
    ToolUnauthorized,
)
from relay.client.remote_tools.http_client import REFUSALS, WireAttempt
from relay.client.remote_tools.redaction import Redaction
from schemas.error_codes import Canonical, Retry
from schemas.error_roots import OperatorError
from schemas.errors import MAX_TEXT, Failure
from schemas.projection import META_CORRELATION_ID, META_ERROR
from schemas.text import printable
from schemas.tls import TlsFilesError
from schemas.ulids import GIVEN_ID

_MAX_RETRY_AFTER_MS = 600_000
_UNKNOWN_TOOL = re.compile(r"(?i)\bunknown tool\b|\btool\b.{0,160}\bnot found\b")

# How pydantic, by which MCP's SDK for Python checks arguments, begins.
_PYDANTIC = re.compile(r"\d{1,6} validation errors? for \S{1,256}Arguments\s")
_FROM_TYPESCRIPT = f"MCP error {INVALID_PARAMS}: "

# What the SDK puts in the place of an answer that is no JSON-RPC, by its status.
_STAND_INS = {
    (-32603, "Server returned an error response"),
    (-32601, "Not Found"),
    (-32600, "Session terminated"),
}
# How the SDK describes a connection or a stream that ended without the answer.
_CLOSED = ("Connection closed", "SSE stream")
_TIMEOUTS = (408, 504)
_TOO_MANY = 429
_TRANSIENT = (425, 500, 502, 503)
_METHOD_NOT_FOUND = -32601
_REQUEST_TIMEOUT = -32001

_CHECK_EFFECT = "Check the effect of the call before calling again, unless the tool is idempotent."
_CHECK_SERVER = "Check that the server is running and that its URL is right, then call again."
_CHECK_FILE = "Name a file or program that exists and that this user may read or run."
_LIST_AGAIN = "List the tools again and use a name from that list."
_READ_SCHEMA = "Read the input schema of the tool and send arguments that fit it."
_REPORT = "Report the correlation_id to the operator of the server."
_CREDENTIAL = "Check the credential for this server: whether it is valid, and what it permits."


class FailureTable:
    """Maps failures of calls to a tool that is ``idempotent`` or not; ``redaction`` is for foreign text."""

    def __init__(self, redaction: Redaction) -> None:
        self._redaction = redaction

    def of_result(self, result: CallToolResult, name: str, *, idempotent: bool) -> RemoteToolError:
        """Return the error of a result of the tool ``name`` with ``isError``."""
        envelope = (result.meta or {}).get(META_ERROR)
        if isinstance(envelope, dict) and (error := self._of_envelope(envelope, idempotent=idempotent)):
            return error
        text = next((item.text for item in result.content if isinstance(item, TextContent)), "no text")
        kind, says, fix = _of_sdk(text, name)
        # Whatever the text, the tool itself may have written it.
        return kind(
            f"{says}: {self._redaction.text(text, MAX_TEXT)}",
            reason=Reason.TOOL_ERROR,
            suggested_fix=fix,
            may_have_run=True,
        )

    def of_jsonrpc(self, error: MCPError, wire: WireAttempt, *, idempotent: bool) -> RemoteToolError:
        """Return the error of a JSON-RPC error, which may be the SDK's stand-in for what ``wire`` shows."""
        if wire.fault is not None:
            return of_fault(wire.fault, wire, idempotent=idempotent)
        code, data = error.error.code, error.error.data
        stand_in = data is None and (code, error.error.message) in _STAND_INS
        status = wire.status
        if status is not None and status >= 300 and (stand_in or status in {*REFUSALS, _TOO_MANY}):  # noqa: PLR2004
            return self._of_refusal(wire) or of_status(status, wire, idempotent=idempotent)
        canonical = data.get("canonical") if isinstance(data, Mapping) else None
        if isinstance(canonical, str) and canonical in Canonical.__members__:
            return self._of_canonical(data, code, idempotent=idempotent)
        return self._of_code(code, error.error.message, idempotent=idempotent)

    def of_connecting(self, error: NotConnectedError) -> RemoteToolError:
        """Return the error of a connection that was not made: nothing of a call was sent."""
        wire, cause = error.wire, error.cause
        if isinstance(cause, TlsFilesError):
            return ToolProviderFailure(str(cause), reason=Reason.UNREACHABLE, suggested_fix=_CHECK_FILE)
        if isinstance(cause, OperatorError):
            return ToolUnauthorized(str(cause), reason=Reason.CREDENTIAL, suggested_fix=_CREDENTIAL)
        if isinstance(cause, MCPError) and wire.fault in {None, Reason.CREDENTIAL}:
            found = self.of_jsonrpc(cause, wire, idempotent=True)
            found.may_have_run = False
            return found
        if isinstance(cause, OSError) and cause.filename is not None:
            # A file or program that the caller has named: what comes over the network has no file.
            text = f"The server cannot be used: {printable(f'{cause.filename}: {cause.strerror}')}."
            return ToolProviderFailure(text, reason=Reason.UNREACHABLE, suggested_fix=_CHECK_FILE)
        return of_fault(Reason.UNREACHABLE, wire, idempotent=True)

    def _of_refusal(self, wire: WireAttempt) -> RemoteToolError | None:
        """Return the error of a refusal in the words of a relay of this project; None if there are none."""
        if wire.status not in REFUSALS or not isinstance(wire.refusal, dict):
            return None
        error = self._of_envelope(wire.refusal, idempotent=True)
        if not isinstance(error, ToolUnauthorized):
            return None
        error.reason, error.code, error.may_have_run = Reason.HTTP_STATUS, wire.status, False
        return error

    def _of_envelope(self, envelope: Mapping[str, Any], *, idempotent: bool) -> RemoteToolError | None:
        row = _row_of(envelope)
        if row is None:
            return None
        retryable = row.value.retry is Retry.YES or (row.value.retry is Retry.IF_IDEMPOTENT and idempotent)
        return ERROR_TYPES[row.value.remote_tool](
            self._redaction.text(_text(envelope.get("message")) or row.value.message, MAX_TEXT),
            reason=Reason.TOOL_ERROR,
            suggested_fix=self._redaction.text(
                _text(envelope.get("suggested_fix")) or row.value.suggested_fix, MAX_TEXT
            ),
            retryable=retryable,
            may_have_run=row.value.retry is Retry.IF_IDEMPOTENT,
            code=row.value.code,
            remote_correlation_id=_id(envelope.get("correlation_id")),
            retry_after_ms=_delay(envelope.get("retry_after_ms")),
        )

    def _of_canonical(self, data: Mapping[str, Any], code: int, *, idempotent: bool) -> RemoteToolError:
        rows = [row for row in Failure if row.value.canonical.name == data["canonical"]]
        is_refusal = data["canonical"] == Canonical.UNAUTHORIZED.name
        return ERROR_TYPES[rows[0].value.remote_tool](
            rows[0].value.canonical.value[2],
            reason=Reason.JSONRPC_ERROR,
            # Outside of a call, what is refused is the token.
            suggested_fix=_CREDENTIAL if is_refusal else rows[0].value.suggested_fix,
            # A hint of the server that a later call may succeed, and no permission to repeat it.
            retryable=data.get("retryable") is True and idempotent,
            may_have_run=any(row.value.retry is Retry.IF_IDEMPOTENT for row in rows),
            code=code,
        )

    def _of_code(self, code: int, message: str, *, idempotent: bool) -> RemoteToolError:
        shown = self._redaction.text(message, MAX_TEXT)
        if code == _METHOD_NOT_FOUND or (code == INVALID_PARAMS and _UNKNOWN_TOOL.search(message[:MAX_TEXT])):
            return ToolNotFound(
                f"The server has no such tool: {shown}",
                reason=Reason.JSONRPC_ERROR,
                suggested_fix=_LIST_AGAIN,
                code=code,
            )
        if code == INVALID_PARAMS:
            return ToolInvalidArguments(
                f"The server rejected the arguments: {shown}",
                reason=Reason.JSONRPC_ERROR,
                suggested_fix=_READ_SCHEMA,
                code=code,
            )
        if code == _REQUEST_TIMEOUT:
            return ToolTimeout(
                f"The server did not answer in time: {shown}",
                reason=Reason.JSONRPC_ERROR,
                suggested_fix=_CHECK_EFFECT,
                retryable=idempotent,
                may_have_run=True,
                code=code,
            )
        if code == CONNECTION_CLOSED and message.startswith(_CLOSED):
            return of_fault(Reason.CONNECTION_LOST, WireAttempt(sends=1), idempotent=idempotent)
        if code == PARSE_ERROR:
            return of_garbage()
        return ToolProviderFailure(
            f"The server reported an error: {shown}",
            reason=Reason.JSONRPC_ERROR,
            suggested_fix=_REPORT,
            may_have_run=True,
            code=code,
        )


def _of_sdk(text: str, name: str) -> tuple[type[RemoteToolError], str, str]:
    """Return the type, beginning and fix of the error that a result of ``name`` reports by ``text``.

    Servers on MCP's own SDKs for Python and TypeScript report an unknown tool, and arguments that they
    reject, in a result, as they report what a tool has failed at.
    """
    text = text.removeprefix(_FROM_TYPESCRIPT)
    if text in {f"Unknown tool: {name}", f"Tool {name} not found", f"Tool {name} disabled"}:
        return ToolNotFound, "The server has no such tool", _LIST_AGAIN
    rejected = text.startswith(("Input validation error: ", f"Invalid arguments for tool {name}: "))
    detail = text.removeprefix(f"Error executing tool {name}: ")
    if rejected or (detail != text and _PYDANTIC.match(detail)):
        return ToolInvalidArguments, "The server rejected the arguments", _READ_SCHEMA
    return (
        ToolProviderFailure,
        "The tool reported an error",
        "Correct what the tool reports, then call again.",
    )


def of_fault(  # noqa: PLR0911 - one return for each fault
    fault: Reason, wire: WireAttempt, *, idempotent: bool
) -> RemoteToolError:
    """Return the error of a fault below HTTP."""
    because = f": {wire.detail}" if wire.detail else ""
    match fault:
        case Reason.CREDENTIAL:
            text = f"There is no valid credential for the server{because}."
            return ToolUnauthorized(text, reason=fault, suggested_fix=_CREDENTIAL)
        case Reason.SECOND_SEND if wire.status in REFUSALS:
            return ToolUnauthorized(
                "The server demanded a new token; a tool that is not idempotent is not sent twice.",
                reason=fault,
                suggested_fix="Call again: a new token has been requested.",
                code=wire.status,
            )
        case Reason.SECOND_SEND:
            return ToolProviderFailure(
                "The server redirected the call; a tool that is not idempotent is not sent twice.",
                reason=fault,
                suggested_fix="Use the URL that the server redirects to.",
                code=wire.status,
            )
        case Reason.UNREACHABLE:
            return ToolProviderFailure(
                f"The server cannot be reached{because}; nothing was sent.",
                reason=fault,
                suggested_fix=wire.advice or _CHECK_SERVER,
                # What has to be changed first fails the same until then.
                retryable=wire.advice is None,
            )
        case Reason.CONNECTION_LOST:
            return ToolProviderFailure(
                "The connection was lost before the answer; the call may have run.",
                reason=fault,
                suggested_fix=_CHECK_EFFECT,
                retryable=idempotent,
                may_have_run=True,
            )
        case Reason.TOO_LARGE:
            return ToolProviderFailure(
                "The answer is larger than this client accepts.",
                reason=fault,
                suggested_fix="Ask for less at once.",
                may_have_run=True,
            )
        case _:
            return of_garbage()


def of_status(status: int, wire: WireAttempt, *, idempotent: bool) -> RemoteToolError:
    """Return the error of an HTTP status."""
    if status in REFUSALS:
        return ToolUnauthorized(
            f"The server refused the credential with HTTP {status}.",
            reason=Reason.HTTP_STATUS,
            suggested_fix=_CREDENTIAL,
            code=status,
        )
    if status in _TIMEOUTS:
        return ToolTimeout(
            f"The server did not answer in time, with HTTP {status}.",
            reason=Reason.HTTP_STATUS,
            suggested_fix=_CHECK_EFFECT,
            retryable=idempotent,
            may_have_run=True,
            code=status,
        )
    if status == _TOO_MANY:
        return ToolProviderFailure(
            "The server limits the rate of calls.",
            reason=Reason.HTTP_STATUS,
            suggested_fix="Wait for retry_after_ms, then call again.",
            retryable=True,
            retry_after_ms=wire.retry_after_ms,
            code=status,
        )
    transient = status in _TRANSIENT
    return ToolProviderFailure(
        f"The server answered with HTTP {status}.",
        reason=Reason.HTTP_STATUS,
        suggested_fix=_CHECK_EFFECT if transient else _CHECK_SERVER,
        retryable=transient and idempotent,
        retry_after_ms=wire.retry_after_ms,
        may_have_run=transient,
        code=status,
    )


def remote_id(result: CallToolResult) -> str | None:
    """Return the id under which the server recorded the call, if it sent one with its result."""
    return _id((result.meta or {}).get(META_CORRELATION_ID))


def of_garbage() -> RemoteToolError:
    """Return the error of an answer that is not MCP."""
    return ToolProviderFailure(
        "The server's answer is not valid MCP.",
        reason=Reason.PROTOCOL,
        suggested_fix=_REPORT,
        may_have_run=True,
    )


def of_unexpected(error: Exception) -> RemoteToolError:
    """Return the error of an exception that nothing expects, of the SDK or of this client, after sending."""
    # Without its text, which can be the server's.
    return ToolProviderFailure(
        f"The client failed with {type(error).__name__}; the call may have run.",
        reason=Reason.PROTOCOL,
        suggested_fix="Check the effect of the call before calling again, and report this as a defect.",
        may_have_run=True,
    )


def _row_of(envelope: Mapping[str, Any]) -> Failure | None:
    """Return the row of an envelope: rows that share a code differ in their suggested fix."""
    rows = [row for row in Failure if row.value.code == envelope.get("code")]
    same = [row for row in rows if row.value.suggested_fix == envelope.get("suggested_fix")]
    return next(iter(same or rows), None)


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None


def _id(value: object) -> str | None:
    return value if isinstance(value, str) and GIVEN_ID.fullmatch(value) else None


def _delay(value: object) -> int | None:
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return min(value, _MAX_RETRY_AFTER_MS)
    return None
