"""The access log: one line for each call, with the same fields for every transport.

JSON in the relay's log, also on a terminal, with the head of every line there. Decisions
and their reasons are in the audit. Must never write
arguments or results.
"""

from datetime import UTC, datetime
from functools import lru_cache
from typing import Any, Protocol

from relay.ascii_json import encoded
from relay.calls.call_record import CallAnswer, CallRecord, CallRequest
from relay.calls.envelope import META_STEP_ID, META_TASK_ID, TOOL_IO_REF
from schemas.errors import Failure, ToolError
from schemas.text import printable

_OK = 200
_DISCONNECTED = 499  # the code that nginx logs when the client closed the request
_MAX_REQUEST_ID = 64


class LineSink(Protocol):
    """Where lines are written. It must not raise: the call has ended, and its answer is still to be sent."""

    def write(self, line: str, /) -> object:
        """Write a line."""


class AccessLog:
    """Writes to ``lines``."""

    def __init__(self, lines: LineSink) -> None:
        self._lines = lines

    def write(
        self,
        request: CallRequest,
        record: CallRecord,
        answer: CallAnswer | None,
        duration_s: float,
        now_ms: int,
    ) -> None:
        """Write the line of a call that has ended; without an ``answer`` its caller disconnected."""
        self._lines.write(encoded(_line(request, record, answer, duration_s, now_ms)) + "\n")


def _line(
    request: CallRequest, record: CallRecord, answer: CallAnswer | None, duration_s: float, now_ms: int
) -> dict[str, Any]:
    call, trace, tool = record.call, record.call.trace, record.tool
    return {
        "ts": _moment(now_ms // 1000) + f".{now_ms % 1000:03d}Z",
        "level": "info",
        "component": "relay",
        "event": "call ended",
        "correlation_id": record.correlation_id,
        "agentId": record.principal.sub if record.principal else None,
        "taskId": _shown(call.label(META_TASK_ID)),
        "stepId": _shown(call.label(META_STEP_ID)),
        "transport": request.caller.transport,
        "route": "/mcp",
        "method": "tools/call",
        "status": _DISCONNECTED if answer is None else _status(record.error),
        "durationMs": int(duration_s * 1e6 + 0.5) / 1000,
        "attempt": record.attempt,
        "inputBytes": request.caller.size,
        "outputBytes": len(answer.text) if answer else 0,
        "requestId": _request_id(call.message.get("id")),
        "traceId": trace.trace_id if trace else None,
        "spanId": record.span_id,
        "metadata": {
            "schemaVersion": TOOL_IO_REF,
            # None if there is no such tool.
            "deterministic": tool.idempotent if tool else None,
            "toolId": printable(call.tool_id, 80),
        },
        "error": _error(record.error),
    }


@lru_cache(maxsize=2)  # hundreds of calls arrive in one second
def _moment(now_s: int) -> str:
    return datetime.fromtimestamp(now_s, UTC).strftime("%Y-%m-%dT%H:%M:%S")


def _status(error: ToolError | None) -> int:
    return _OK if error is None else error.failure.value.http_status


def _error(error: ToolError | None) -> dict[str, str] | None:
    if error is None:
        return None
    row = error.failure.value
    # Not the detail of invalid arguments: it can name a member, and no text of a caller is logged.
    message = row.message if error.failure is Failure.ARGUMENTS_INVALID else error.detail or row.message
    return {"canonical": row.canonical.name, "message": message}


def _shown(text: str | None) -> str | None:
    return None if text is None else printable(text)


def _request_id(value: object) -> str | int | None:
    if isinstance(value, str):
        return printable(value, _MAX_REQUEST_ID)
    return value if isinstance(value, int) and not isinstance(value, bool) else None
