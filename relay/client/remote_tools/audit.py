"""One record of every attempt, every refusal, and every call that ended before its first attempt.

``started`` is written before the first byte of an attempt leaves, ``ended`` after it: ``started`` alone
means that the outcome is unknown, and ``ended`` of attempt 0 that nothing was sent. If ``started`` cannot be
written, nothing is. Must not contain arguments or results, except redacted and only if the operator
configured it.
"""

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, NotRequired, TypedDict

from attrs import define, field

from relay.client.remote_tools.redaction import REDACTED, Redaction
from schemas.error_roots import StateError
from schemas.files import open_state
from schemas.text import printable

_MAX_VALUE_BYTES = 16 * 1024
_CHECKED_EVERY_S = 1.0
_ENCODER = json.JSONEncoder(separators=(",", ":"))


class Event(StrEnum):
    """What a record is of."""

    REFUSED = "refused"
    STARTED = "started"
    ENDED = "ended"


class AuditRecord(TypedDict):
    """One record. ``arguments`` and ``result`` are present only if the operator configured a redaction."""

    time_ms: int
    event: Event
    decision: str
    correlation_id: str
    traceparent: NotRequired[str]
    tool: str
    attempt: int
    risk: NotRequired[str]
    outcome: NotRequired[str]
    reason: NotRequired[str]
    code: NotRequired[str | int]
    remote_correlation_id: NotRequired[str]
    duration_ms: NotRequired[float]
    arguments: NotRequired[Any]
    result: NotRequired[Any]


AuditSink = Callable[[AuditRecord], None]
"""Writes a record, or raises."""


class AuditFailedError(StateError):
    """A record could not be written. Of ``started``, nothing was sent; of ``ended``, the call has ended."""


@define(eq=False, repr=False)
class JsonLines:
    """Appends records to a file of mode 0600, one line and one write each, so that processes can share it.

    The file is kept open, and opened again within a second once another is in its place, as a rotated log.
    """

    _path: Path
    _monotonic: Callable[[], float]
    _checked_s: float = field(default=0.0, init=False)
    _descriptor: int | None = field(default=None, init=False)
    _opened: os.stat_result | None = field(default=None, init=False)

    def __call__(self, record: AuditRecord) -> None:
        """Write ``record``.

        Raises:
            OSError: it was not written as a whole.
        """
        line = _ENCODER.encode(record).encode("ascii") + b"\n"
        if os.write(self._file(), line) != len(line):
            raise AuditFailedError(f"{self._path}: a record was not written as a whole")

    def close(self) -> None:
        """Close the file; the next record opens it again."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _file(self) -> int:
        now_s = self._monotonic()
        if now_s - self._checked_s >= _CHECKED_EVERY_S:
            self._checked_s = now_s
            if not self._is_in_place():
                self.close()
        if self._descriptor is None:
            self._descriptor = open_state(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
            self._opened = os.fstat(self._descriptor)
        return self._descriptor

    def _is_in_place(self) -> bool:
        try:
            there = os.lstat(self._path)
        except FileNotFoundError:
            return False
        return self._opened is not None and os.path.samestat(there, self._opened)


@dataclass(frozen=True, slots=True)
class Recorded:
    """What every record of one call has."""

    correlation_id: str
    tool: str
    risk: str | None = None
    traceparent: str | None = None


@define(eq=False, repr=False)
class CallAudit:
    """Makes the records of calls. ``redaction`` of None leaves arguments and results out."""

    _sink: AuditSink
    _redaction: Redaction | None
    _now_ms: Callable[[], int]

    def refused(self, call: Recorded, duration_ms: float, reason: str, arguments: object) -> None:
        record = self._record(call, Event.REFUSED, "refused", 0)
        record["duration_ms"] = round(duration_ms, 3)
        record["reason"] = reason
        if self._redaction is not None:
            record["arguments"] = self._shown(arguments)
        self._write(record)

    def started(self, call: Recorded, attempt: int, arguments: object) -> None:
        record = self._record(call, Event.STARTED, "allowed", attempt)
        if self._redaction is not None:
            record["arguments"] = self._shown(arguments)
        self._write(record)

    def ended(  # noqa: PLR0913, PLR0917 - the members of a record
        self,
        call: Recorded,
        attempt: int,
        duration_ms: float,
        reason: str | None = None,
        code: str | int | None = None,
        remote_id: str | None = None,
        result: object = None,
    ) -> None:
        """Record how ``attempt`` ended: well if ``reason`` is None."""
        record = self._record(call, Event.ENDED, "allowed", attempt)
        record["outcome"] = "ok" if reason is None else "error"
        record["duration_ms"] = round(duration_ms, 3)
        if reason is not None:
            record["reason"] = reason
        if code is not None:
            record["code"] = code
        if remote_id is not None:
            record["remote_correlation_id"] = remote_id
        if self._redaction is not None and reason is None:
            record["result"] = self._shown(result)
        self._write(record)

    def _record(self, call: Recorded, event: Event, decision: str, attempt: int) -> AuditRecord:
        record = AuditRecord(
            time_ms=self._now_ms(),
            event=event,
            decision=decision,
            correlation_id=call.correlation_id,
            tool=printable(call.tool, 256),
            attempt=attempt,
        )
        if call.traceparent is not None:
            record["traceparent"] = call.traceparent
        if call.risk is not None:
            record["risk"] = call.risk
        return record

    def _shown(self, value: object) -> Any:
        shown = self._redaction.value(value) if self._redaction is not None else REDACTED
        if len(json.dumps(shown)) > _MAX_VALUE_BYTES:
            return f"[more than {_MAX_VALUE_BYTES} bytes]"
        return shown

    def _write(self, record: AuditRecord) -> None:
        try:
            self._sink(record)
        except Exception as error:
            raise AuditFailedError(f"the audit record {record['event']} could not be written") from error
