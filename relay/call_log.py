"""One line a call, the same fields by every transport: what a developer of agents looks for.

JSON on the relay's log, also on a terminal. Who decided what and why is the audit's. Must never be given
arguments or results.
"""

import json
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import lru_cache
from typing import Any, TextIO

from relay.envelope import META_STEP_ID, META_TASK_ID, TOOL_IO_REF, Call, Trace
from schemas.errors import ToolError
from schemas.text import printable

_ENCODER = json.JSONEncoder(separators=(",", ":"))
_OK = 200
_GONE = 499  # as others write it: the caller closed the request
_MAX_REQUEST_ID = 64


@dataclass(frozen=True, slots=True)
class Finished:
    """What is known of a call when it is over.

    Attributes:
        agent_id: the subject of the token; None if that was not accepted.
        deterministic: whether the tool is idempotent; None if there is no such tool.
        attempt: how often the call was sent under its idempotency key; 1 without one.
        answered: whether there was still somebody to answer.
    """

    call: Call
    transport: str
    agent_id: str | None
    deterministic: bool | None
    attempt: int
    error: ToolError | None
    answered: bool
    duration_s: float
    input_bytes: int
    output_bytes: int
    trace: Trace | None
    span_id: str | None


class CallLog:
    """Writes to ``stream``."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, finished: Finished, now_ms: int) -> None:
        """Write the line of one call."""
        self._stream.write(_ENCODER.encode(_record(finished, now_ms)) + "\n")


def _record(finished: Finished, now_ms: int) -> dict[str, Any]:
    call, error = finished.call, finished.error
    return {
        "ts": _moment(now_ms // 1000) + f".{now_ms % 1000:03d}Z",
        "agentId": finished.agent_id,
        "taskId": _shown(call.label(META_TASK_ID)),
        "stepId": _shown(call.label(META_STEP_ID)),
        "transport": finished.transport,
        "route": "/mcp",
        "method": "tools/call",
        "status": _status(finished),
        "durationMs": round(finished.duration_s * 1000, 3),
        "attempt": finished.attempt,
        "inputBytes": finished.input_bytes,
        "outputBytes": finished.output_bytes,
        "requestId": _request_id(call.message.get("id")),
        "traceId": finished.trace.trace_id if finished.trace else None,
        "spanId": finished.span_id,
        "metadata": {
            "schemaVersion": TOOL_IO_REF,
            "deterministic": finished.deterministic,
            "toolId": printable(call.tool_id, 80),
        },
        "error": None
        if error is None
        else {
            "canonical": error.failure.value.canonical.name,
            "message": error.detail or error.failure.value.message,
        },
    }


@lru_cache(maxsize=2)  # calls come by the hundred in one second
def _moment(now_s: int) -> str:
    return datetime.fromtimestamp(now_s, UTC).strftime("%Y-%m-%dT%H:%M:%S")


def _status(finished: Finished) -> int:
    if not finished.answered:
        return _GONE
    return _OK if finished.error is None else finished.error.failure.value.http_status


def _shown(text: str | None) -> str | None:
    return None if text is None else printable(text)


def _request_id(value: object) -> str | int | None:
    if isinstance(value, str):
        return printable(value, _MAX_REQUEST_ID)
    return value if isinstance(value, int) and not isinstance(value, bool) else None
