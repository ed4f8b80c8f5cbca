"""What is written of a call that has ended, or a malformed message: its line in the access log, and its span.

A line is JSON in the relay's log, also on a terminal, with the same fields for every transport, and begins as
every line there does. Decisions and their reasons are in the audit. Refusals for a rate, of which an agent
can cause any number, are summed up by agent and code: the first has its line, and then one a minute says how
many were left out. Must never write arguments or results.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import lru_cache
from typing import Any, Protocol

from attrs import define, field

from relay.auth.agent_tokens import AgentName
from relay.calls.envelope import TOOL_IO_REF
from relay.calls.executor import CallRecord, CallRequest
from relay.calls.results import CallAnswer
from relay.observability.ascii_json import encoded
from schemas.errors import Failure, ToolError
from schemas.projection import META_STEP_ID, META_TASK_ID
from schemas.spans import Span
from schemas.text import printable

_OK = 200
_DISCONNECTED = 499  # the code that nginx logs when the client closed the request
_MAX_REQUEST_ID = 64
_MAX_METHOD = 64
_MAX_TOOL_ID = 80
_NULL = "null"
_MAX_SUMMED = 500
_PAUSE_S = 60.0

_Key = tuple[AgentName | None, Failure]


class LineSink(Protocol):
    """Where lines are written. It must not raise: the call has ended, and its answer is still to be sent."""

    def write(self, line: str, /) -> object:
        """Write a line."""


@dataclass(slots=True)
class _Sum:
    """Refusals since the last line: how many, and the line of the last one."""

    due_s: float
    count: int = 0
    last: str = ""


@define(eq=False, repr=False)
class AccessLog:
    """Writes to ``lines``."""

    _lines: LineSink
    _sums: dict[_Key, _Sum] = field(init=False, factory=dict)

    def write(
        self,
        request: CallRequest,
        record: CallRecord,
        answer: CallAnswer | None,
        duration_s: float,
        now_ms: int,
    ) -> None:
        """Write the line of a call that has ended; without an ``answer`` its caller disconnected."""
        now_s = record.started + duration_s
        self._write_due(now_s)
        line = _line(request, record, answer, duration_s, now_ms)
        if record.error is None or not (record.counted or record.error.failure is Failure.RATE_LIMITED):
            self._lines.write(line)
            return
        key = record.principal.name if record.principal else None, record.error.failure
        if (summed := self._sums.get(key)) is not None:
            summed.count += 1
            summed.last = line
            return
        if len(self._sums) >= _MAX_SUMMED:
            self._write_sum(self._sums.pop(next(iter(self._sums))))
        self._sums[key] = _Sum(now_s + _PAUSE_S)
        self._lines.write(line)

    def close(self) -> None:
        self._write_due(math.inf)

    def _write_due(self, now_s: float) -> None:
        """Write the sums of those that had no line for a minute; the first of them is due first."""
        while self._sums:
            key, summed = next(iter(self._sums.items()))
            if summed.due_s > now_s:
                return
            del self._sums[key]
            if summed.count:
                self._write_sum(summed)
                if now_s < math.inf:
                    self._sums[key] = _Sum(now_s + _PAUSE_S)

    def _write_sum(self, summed: _Sum) -> None:
        if summed.count:
            self._lines.write(f'{summed.last[:-2]},"kept_back":{summed.count - 1}}}\n')


def _line(
    request: CallRequest, record: CallRecord, answer: CallAnswer | None, duration_s: float, now_ms: int
) -> str:
    """Return the line, put together from its members: to encode it as a whole takes three times as long.

    What came from outside is encoded. Numbers, ids and words of our own need no escape.
    """
    call, trace, tool = record.call, record.call.trace, record.tool
    # By its alphabet it needs no escape.
    given_id = f'"caller_correlation_id":"{call.given_id}",' if call.given_id else ""
    agent = encoded(record.principal.sub) if record.principal else _NULL
    status = _DISCONNECTED if answer is None else _OK
    if answer is not None and record.error is not None:
        status = record.error.failure.value.http_status
    output_bytes = len(answer.text) if answer else 0
    # Null if there is no such tool. A parsed name has no character that needs an escape, either.
    deterministic = _NULL if tool is None else "true" if tool.idempotent else "false"
    tool_id = f'"{call.tool_id}"' if call.parsed else _shown(call.tool_id, _MAX_TOOL_ID)
    return (
        f'{{"ts":"{_moment(now_ms // 1000)}.{now_ms % 1000:03d}Z","level":"info","component":"relay",'
        f'"event":"call ended","correlation_id":"{record.correlation_id}",{given_id}"agentId":{agent},'
        f'"taskId":{_shown(call.label(META_TASK_ID))},"stepId":{_shown(call.label(META_STEP_ID))},'
        f'"transport":"{request.caller.transport}","route":"{request.caller.path}","method":{_method(call.message)},'
        f'"status":{status},"durationMs":{int(duration_s * 1e6 + 0.5) / 1000},"attempt":{record.attempt},'
        f'"inputBytes":{request.caller.size},"outputBytes":{output_bytes},'
        f'"requestId":{_request_id(call.message.get("id"))},'
        f'"traceId":{_hex(trace.trace_id if trace else None)},"spanId":{_hex(record.span_id)},'
        f'"metadata":{{"schemaVersion":"{TOOL_IO_REF}","deterministic":{deterministic},"toolId":{tool_id}}},'
        f'"error":{_error(record.error)}}}\n'
    )


@lru_cache(maxsize=2)  # hundreds of calls arrive in one second
def _moment(now_s: int) -> str:
    return datetime.fromtimestamp(now_s, UTC).strftime("%Y-%m-%dT%H:%M:%S")


def _error(error: ToolError | None) -> str:
    if error is None:
        return _NULL
    row = error.failure.value
    # Not the detail of invalid arguments: it can name a member, and no text of a caller is logged.
    message = row.message if error.failure is Failure.ARGUMENTS_INVALID else error.detail or row.message
    return encoded({"canonical": row.canonical.name, "message": message})


def _shown(text: str | None, limit: int = 256) -> str:
    return _NULL if text is None else encoded(printable(text, limit))


def _hex(digits: str | None) -> str:
    return _NULL if digits is None else f'"{digits}"'


def _method(message: Mapping[str, Any]) -> str:
    method = message.get("method")
    if method == "tools/call":
        return '"tools/call"'
    return _shown(method, _MAX_METHOD) if isinstance(method, str) else _NULL


def _request_id(value: object) -> str:
    if isinstance(value, str):
        return _shown(value, _MAX_REQUEST_ID)
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else _NULL


def span_of(record: CallRecord, outcome: str, duration_s: float) -> Span | None:
    """Return the span of a call that has ended; None of one that is not traced, or was not sent to a node.

    ``outcome`` is ``ok``, ``cancelled`` or the code of its failure.
    """
    trace, tool = record.call.trace, record.tool
    if trace is None or tool is None or record.span_id is None:
        return None
    attributes = {
        "edge.tool": tool.canonical,
        "edge.node_id": tool.node_id or "",
        "edge.correlation_id": record.correlation_id,
        "edge.outcome": outcome,
    }
    if record.call.given_id:
        attributes["edge.caller_correlation_id"] = record.call.given_id
    failed = None if outcome == "ok" else outcome
    if failed is not None:
        attributes["edge.hop"] = record.hop.value
    return Span(
        "edge.call",
        trace.trace_id,
        duration_s,
        attributes,
        span_id=record.span_id,
        parent_id=trace.parent_id,
        error=failed,
    )
