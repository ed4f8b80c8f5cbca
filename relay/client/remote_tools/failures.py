"""From what a server, the SDK or the network did to one of the five errors.

A relay of this project is recognised by its error envelope, whose codes the one table of ``schemas.errors``
explains. Must not pass on a server's text unless it is printable, short and redacted.
"""

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from attrs import define
from mcp.shared.exceptions import MCPError
from mcp_types import CONNECTION_CLOSED, INVALID_PARAMS, PARSE_ERROR, CallToolResult, TextContent

from relay.client.http import ProxyError
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
from relay.client.remote_tools.redaction import Redaction
from relay.client.remote_tools.servers import REFUSALS, WireAttempt
from schemas.error_roots import OperatorError
from schemas.errors import MAX_TEXT, Canonical, Failure, Retry
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

_CHECK_EFFECT = "Check the effect of the call before calling again, unless the tool is idempotent."
_CHECK_SERVER = "Check that the server is running and that its URL is right, then call again."
_CHECK_FILE = "Name a file or program that exists and that this user may read or run."
_CHECK_PROXY = "Correct that variable, or name the server in no_proxy."
_LIST_AGAIN = "List the tools again and use a name from that list."
_READ_SCHEMA = "Read the input schema of the tool and send arguments that fit it."
_REPORT = "Report the correlation_id to the operator of the server."
_WAIT = "Wait for retry_after_ms, then call again."
_CREDENTIAL = "Check the credential for this server: whether it is valid, and what it permits."


class _Row(NamedTuple):
    """One failure. ``ran``: the tool may have run, as where the call may be repeated if it is idempotent."""

    text: str
    fix: str
    kind: type[RemoteToolError] = ToolProviderFailure
    retry: Retry = Retry.NO
    ran: bool = False

    def error(self, reason: Reason, *, idempotent: bool = False, **members: Any) -> RemoteToolError:
        return self.kind(
            self.text.format(**members),
            reason=reason,
            suggested_fix=self.fix,
            retryable=_may_repeat(self.retry, idempotent=idempotent),
            may_have_run=self.ran or self.retry is Retry.IF_IDEMPOTENT,
            code=members.get("code"),
            retry_after_ms=members.get("retry_after_ms"),
        )


_TRANSIENT = Retry.IF_IDEMPOTENT
_UNKNOWN = _Row("The server has no such tool: {shown}", _LIST_AGAIN, ToolNotFound)
_REJECTED = _Row("The server rejected the arguments: {shown}", _READ_SCHEMA, ToolInvalidArguments)
_REPORTED = _Row("The tool reported an error: {shown}", "Correct what the tool reports, then call again.")
_GARBAGE = _Row("The server's answer is not valid MCP.", _REPORT, ran=True)

_BY_CODE = {
    -32601: _UNKNOWN,
    INVALID_PARAMS: _REJECTED,
    -32001: _Row("The server did not answer in time: {shown}", _CHECK_EFFECT, ToolTimeout, _TRANSIENT),
}
_OTHER_CODE = _Row("The server reported an error: {shown}", _REPORT, ran=True)

_ANSWERED = "The server answered with HTTP {code}."
_TOO_MANY = 429
_LAST_OF_HTTP = 505
"""What RFC 9110 has last."""
_BY_STATUS = {
    **dict.fromkeys(
        REFUSALS, _Row("The server refused the credential with HTTP {code}.", _CREDENTIAL, ToolUnauthorized)
    ),
    **dict.fromkeys(
        (408, 504),
        _Row("The server did not answer in time, with HTTP {code}.", _CHECK_EFFECT, ToolTimeout, _TRANSIENT),
    ),
    **dict.fromkeys((425, 500, 502, 503), _Row(_ANSWERED, _CHECK_EFFECT, retry=_TRANSIENT)),
    _TOO_MANY: _Row("The server limits the rate of calls.", _WAIT, retry=Retry.YES),
}
_OTHER_STATUS = _Row(_ANSWERED, _CHECK_SERVER)

_NOT_TWICE = "a tool that is not idempotent is not sent twice."
_RENEWED = _Row(
    f"The server demanded a new token; {_NOT_TWICE}",
    "Call again: a new token has been requested.",
    ToolUnauthorized,
)
_BY_FAULT = {
    Reason.CREDENTIAL: _Row(
        "There is no valid credential for the server{because}.", _CREDENTIAL, ToolUnauthorized
    ),
    Reason.SECOND_SEND: _Row(
        f"The server redirected the call; {_NOT_TWICE}", "Use the URL that the server redirects to."
    ),
    Reason.UNREACHABLE: _Row(
        "The server cannot be reached{because}; nothing was sent.", _CHECK_SERVER, retry=Retry.YES
    ),
    Reason.CONNECTION_LOST: _Row(
        "The connection was lost before the answer; the call may have run.", _CHECK_EFFECT, retry=_TRANSIENT
    ),
    Reason.TOO_LARGE: _Row(
        "The answer is larger than this client accepts.", "Ask for less at once.", ran=True
    ),
}


@define(eq=False, repr=False)
class FailureTable:
    """Maps failures of calls to a tool that is ``idempotent`` or not; ``redaction`` is for foreign text."""

    _redaction: Redaction

    def of_result(self, result: CallToolResult, name: str, *, idempotent: bool) -> RemoteToolError:
        envelope = (result.meta or {}).get(META_ERROR)
        if isinstance(envelope, dict) and (error := self._of_envelope(envelope, idempotent=idempotent)):
            return error
        text = next((item.text for item in result.content if isinstance(item, TextContent)), "no text")
        error = _of_sdk(text, name).error(Reason.TOOL_ERROR, shown=self._redaction.text(text, MAX_TEXT))
        error.may_have_run = True  # whatever the text: the tool itself may have written it
        return error

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

    def of_listing(self, error: MCPError, wire: WireAttempt) -> RemoteToolError:
        """Return the error of a listing or of a connection, as ``of_jsonrpc``: nothing of a call was sent."""
        found = self.of_jsonrpc(error, wire, idempotent=True)
        if found.reason is Reason.CONNECTION_LOST:
            found = _BY_FAULT[Reason.UNREACHABLE].error(found.reason, because=": the connection was lost")
        found.may_have_run = False
        return found

    def of_connecting(self, error: NotConnectedError) -> RemoteToolError:
        """Return the error of a connection that was not made: nothing of a call was sent."""
        wire, cause = error.wire, error.cause
        if isinstance(cause, TlsFilesError):
            return ToolProviderFailure(str(cause), reason=Reason.UNREACHABLE, suggested_fix=_CHECK_FILE)
        if isinstance(cause, ProxyError):
            return ToolProviderFailure(str(cause), reason=Reason.UNREACHABLE, suggested_fix=_CHECK_PROXY)
        if isinstance(cause, OperatorError):
            return ToolUnauthorized(str(cause), reason=Reason.CREDENTIAL, suggested_fix=_CREDENTIAL)
        if isinstance(cause, MCPError) and wire.fault in {None, Reason.CREDENTIAL}:
            return self.of_listing(cause, wire)
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
        rows = [row for row in Failure if row.value.code == envelope.get("code")]
        # Rows that share a code differ in their suggested fix.
        same = [row for row in rows if row.value.suggested_fix == envelope.get("suggested_fix")]
        row = next(iter(same or rows), None)
        if row is None:
            return None

        def text(member: str, otherwise: str) -> str:
            given = envelope.get(member)
            return self._redaction.text(given if isinstance(given, str) and given else otherwise, MAX_TEXT)

        return ERROR_TYPES[row.value.remote_tool](
            text("message", row.value.message),
            reason=Reason.TOOL_ERROR,
            suggested_fix=text("suggested_fix", row.value.suggested_fix),
            retryable=_may_repeat(row.value.retry, idempotent=idempotent),
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
        if code == CONNECTION_CLOSED and message.startswith(_CLOSED):
            return of_fault(Reason.CONNECTION_LOST, WireAttempt(sends=1), idempotent=idempotent)
        if code == PARSE_ERROR:
            return of_garbage()
        row = _BY_CODE.get(code, _OTHER_CODE)
        if row is _REJECTED and _UNKNOWN_TOOL.search(message[:MAX_TEXT]):
            row = _UNKNOWN
        return row.error(Reason.JSONRPC_ERROR, idempotent=idempotent, code=code, shown=shown)


def _of_sdk(text: str, name: str) -> _Row:
    """Return the failure that a result of ``name`` reports by ``text``.

    Servers on MCP's own SDKs for Python and TypeScript report an unknown tool, and arguments that they
    reject, in a result, as they report what a tool has failed at.
    """
    text = text.removeprefix(_FROM_TYPESCRIPT)
    if text in {f"Unknown tool: {name}", f"Tool {name} not found", f"Tool {name} disabled"}:
        return _UNKNOWN
    rejected = text.startswith(("Input validation error: ", f"Invalid arguments for tool {name}: "))
    detail = text.removeprefix(f"Error executing tool {name}: ")
    return _REJECTED if rejected or (detail != text and _PYDANTIC.match(detail)) else _REPORTED


def of_fault(fault: Reason, wire: WireAttempt, *, idempotent: bool) -> RemoteToolError:
    """Return the error of a fault below HTTP."""
    row = _BY_FAULT.get(fault)
    if row is None:
        return of_garbage()
    error = (_RENEWED if fault is Reason.SECOND_SEND and wire.status in REFUSALS else row).error(
        fault,
        idempotent=idempotent,
        code=wire.status if fault is Reason.SECOND_SEND else None,
        because=f": {wire.detail}" if wire.detail else "",
    )
    if fault is Reason.UNREACHABLE and wire.advice is not None:
        # What has to be changed first fails the same until then.
        error.suggested_fix, error.retryable = wire.advice, False
    return error


def of_status(status: int, wire: WireAttempt, *, idempotent: bool) -> RemoteToolError:
    """Return the error of an HTTP status."""
    # Of a proxy that has waited for the server in vain (Cloudflare's 524) as of the server itself.
    row = _BY_STATUS.get(status, _BY_STATUS[500] if status > _LAST_OF_HTTP else _OTHER_STATUS)
    delay_ms = wire.retry_after_ms if row.kind is ToolProviderFailure else None
    return row.error(Reason.HTTP_STATUS, idempotent=idempotent, code=status, retry_after_ms=delay_ms)


def remote_id(result: CallToolResult) -> str | None:
    """Return the id under which the server recorded the call, if it sent one with its result."""
    return _id((result.meta or {}).get(META_CORRELATION_ID))


def of_garbage() -> RemoteToolError:
    """Return the error of an answer that is not MCP."""
    return _GARBAGE.error(Reason.PROTOCOL)


def of_unexpected(error: Exception) -> RemoteToolError:
    """Return the error of an exception that nothing expects, of the SDK or of this client, after sending."""
    # Without its text, which can be the server's.
    return ToolProviderFailure(
        f"The client failed with {type(error).__name__}; the call may have run.",
        reason=Reason.PROTOCOL,
        suggested_fix="Check the effect of the call before calling again, and report this as a defect.",
        may_have_run=True,
    )


def _may_repeat(retry: Retry, *, idempotent: bool) -> bool:
    return retry is Retry.YES or (retry is Retry.IF_IDEMPOTENT and idempotent)


def _id(value: object) -> str | None:
    return value if isinstance(value, str) and GIVEN_ID.fullmatch(value) else None


def _delay(value: object) -> int | None:
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return min(value, _MAX_RETRY_AFTER_MS)
    return None
