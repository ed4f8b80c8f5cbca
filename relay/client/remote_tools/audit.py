"""One record of every attempt, every refusal, and every call that ended before its first attempt.

``started`` is written before the first byte of an attempt leaves, ``ended`` after it: ``started`` alone
means that the outcome is unknown, and ``ended`` of attempt 0 that nothing was sent. If ``started`` cannot be
written, nothing is. Must not contain arguments or results, except redacted and only if the operator
configured it.
"""

import json
import os
from collections.abc import Callable, Mapping
from enum import StrEnum
from pathlib import Path
from typing import Any, NotRequired, TypedDict, cast

from attrs import define, field

from relay.client.remote_tools.redaction import Redaction
from schemas.error_roots import StateError
from schemas.files import open_state
from schemas.text import printable
from schemas.times import SystemClock

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
    What a full disk or a power cut has left without its end is ended before the next record, which would be
    lost with it otherwise.
    """

    _path: Path
    _monotonic: Callable[[], float]
    _checked_s: float = field(default=0.0, init=False)
    _descriptor: int | None = field(default=None, init=False)

    def __call__(self, record: AuditRecord) -> None:
        """Write ``record``.

        Raises:
            OSError: it was not written as a whole.
        """
        descriptor = self._file()
        line = _ENCODER.encode(record).encode("ascii") + b"\n"
        size = os.fstat(descriptor).st_size
        if size and os.pread(descriptor, 1, size - 1) != b"\n":
            line = b"\n" + line
        if os.write(descriptor, line) != len(line):
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
            if self._descriptor is not None and not self._is_in_place(self._descriptor):
                self.close()
        if self._descriptor is None:
            self._descriptor = open_state(self._path, os.O_RDWR | os.O_APPEND | os.O_CREAT)
        return self._descriptor

    def _is_in_place(self, descriptor: int) -> bool:
        try:
            return os.path.samestat(os.lstat(self._path), os.fstat(descriptor))
        except FileNotFoundError:
            return False


@define(eq=False, repr=False)
class RemoteCall:
    """One call: what all of its records have. ``risk`` is None until its contract is known."""

    correlation_id: str
    tool: str
    arguments: Any
    traceparent: str
    risk: str | None = None


@define(eq=False, repr=False)
class CallAudit:
    """Makes the records of calls. ``redaction`` of None leaves arguments and results out."""

    _sink: AuditSink
    _redaction: Redaction | None
    _now_ms: SystemClock

    def refused(self, call: RemoteCall, duration_ms: float, reason: str) -> None:
        shown = {"arguments": call.arguments}
        self._write(call, Event.REFUSED, 0, shown, duration_ms=round(duration_ms, 3), reason=reason)

    def started(self, call: RemoteCall, attempt: int) -> None:
        self._write(call, Event.STARTED, attempt, {"arguments": call.arguments})

    def ended(  # noqa: PLR0913, PLR0917 - the members of a record
        self,
        call: RemoteCall,
        attempt: int,
        duration_ms: float,
        reason: str | None = None,
        code: str | int | None = None,
        remote_id: str | None = None,
        result: object = None,
    ) -> None:
        """Record how ``attempt`` ended: well if ``reason`` is None."""
        self._write(
            call,
            Event.ENDED,
            attempt,
            {"result": result} if reason is None else {},
            outcome="ok" if reason is None else "error",
            duration_ms=round(duration_ms, 3),
            reason=reason,
            code=code,
            remote_correlation_id=remote_id,
        )

    def _write(
        self, call: RemoteCall, event: Event, attempt: int, shown: Mapping[str, object], **members: Any
    ) -> None:
        """Write a record of what ``members`` has, and of ``shown`` as far as the operator permits."""
        members = {
            "time_ms": self._now_ms(),
            "event": event,
            "decision": "refused" if event is Event.REFUSED else "allowed",
            "correlation_id": call.correlation_id,
            "tool": printable(call.tool, 256),
            "attempt": attempt,
            "traceparent": call.traceparent,
            "risk": call.risk,
            **members,
        }
        record: dict[str, Any] = {name: value for name, value in members.items() if value is not None}
        if self._redaction is not None:
            for name, value in shown.items():
                redacted = self._redaction.value(value)
                is_large = len(json.dumps(redacted)) > _MAX_VALUE_BYTES
                record[name] = f"[more than {_MAX_VALUE_BYTES} bytes]" if is_large else redacted
        try:
            self._sink(cast("AuditRecord", record))
        except Exception as error:
            raise AuditFailedError(f"the audit record {event} could not be written") from error
