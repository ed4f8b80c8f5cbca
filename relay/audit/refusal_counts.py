"""What is refused or dropped, in the audit as counted lines: the first within a second, then one a minute.

A line is for one source, event and reason; the addresses of one IPv6 subscriber are one source. The lines of
a minute are bounded: sources beyond the bound are counted together as ``others``. While little space is left
on the disk nothing is written and the counts are kept: that space is reserved for calls. Must not be used for
calls: each of those has lines of its own.
"""

import asyncio
import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from attrs import Factory, define, field
from structlog.typing import FilteringBoundLogger

from relay.audit.log import AuditUnavailableError
from relay.audit.writer import AuditWriter
from schemas.addresses import address_group
from schemas.health import Loop

MAX_UNAUTHENTICATED = 120
"""As many lines a minute name a source that has proven nothing."""
MAX_AUTHENTICATED = 500
"""As many name a node or an agent that has proven who it is."""
OTHERS = "others"

_INTERVAL_S = 1.0
_ROUND_S = 120.0
_PAUSE_S = 60.0
_TURN_S = 0.1


class RefusalEvent(StrEnum):
    """What is counted, as the audit names it; each comment says what its source is."""

    # the network address
    REQUEST_REFUSED = "request_refused"
    TOKEN_REFUSED = "token_refused"  # noqa: S105 - an event, and no password
    NODE_REFUSED = "node_refused"
    ENROLMENT_REFUSED = "enrolment_refused"
    SIGN_IN_REFUSED = "sign_in_refused"
    # the relay itself
    ENROLMENT_FAILING = "enrolment_failing"
    # the node of whose topic or session it is
    IDENTITY_REFUSED = "identity_refused"
    MANIFEST_REFUSED = "manifest_refused"
    # the node of whose topic it is
    HEARTBEAT_REFUSED = "heartbeat_refused"
    MESSAGE_DROPPED = "message_dropped"
    # the node, which has proven its identity
    FRAME_DROPPED = "frame_dropped"
    SESSION_BROKEN = "session_broken"
    IDENTITY_TWICE = "identity_twice"
    CALLER_TOOL_REFUSED = "caller_tool_refused"
    # the agent
    CALL_REFUSED = "call_refused"


class RefusalReason(StrEnum):
    """Why, where it is for no reason of a token, an identity, a frame or a call."""

    TOKEN_TWICE = "twice"  # noqa: S105 - a reason, and no password
    NO_LEAF = "unvouched"  # operators search the audit for it: the value stays
    TOO_MANY = "too_many"
    MALFORMED = "malformed"
    SAMPLE_INVALID = "sample_invalid"
    SUPERSEDED = "superseded"
    PROTOCOL = "protocol"
    FRAME_TOO_LARGE = "frame_too_large"
    FLOODED = "flooded"
    REQUEST_UNKNOWN = "request_unknown"
    SESSION_UNKNOWN = "session_unknown"
    MESSAGE_TOO_LARGE = "message_too_large"


_AUTHENTICATED = frozenset(
    {
        RefusalEvent.FRAME_DROPPED,
        RefusalEvent.SESSION_BROKEN,
        RefusalEvent.IDENTITY_TWICE,
        RefusalEvent.CALLER_TOOL_REFUSED,
        RefusalEvent.CALL_REFUSED,
    }
)

_Key = tuple[RefusalEvent, str, str]


@dataclass(slots=True)
class _Count:
    """What was counted since the last line, when there may be another, and the id that answers name it by."""

    count: int = 0
    due: float = 0.0
    correlation_id: str | None = None


@define(eq=False, repr=False)
class RefusalCounter:
    """Counts, and writes what is due. ``monotonic`` is in seconds, ``new_id`` makes correlation ids."""

    _audit: AuditWriter
    _log: FilteringBoundLogger
    _monotonic: Callable[[], float]
    _new_id: Callable[[], str]
    _interval_s: float = _INTERVAL_S
    # A source is kept for a minute after its line, so the bound on sources bounds the lines a minute.
    _unauthenticated: dict[_Key, _Count] = field(init=False, factory=dict)
    _authenticated: dict[_Key, _Count] = field(init=False, factory=dict)
    _others: dict[_Key, _Count] = field(init=False, factory=dict)
    _unwritten: str | None = field(init=False, default=None)
    loop: Loop = field(init=False, default=Factory(lambda self: Loop(self._monotonic), takes_self=True))

    def count(self, event: RefusalEvent, source: str, reason: str, times: int = 1) -> bool:
        """Count ``event`` from ``source``, for ``reason``, which is a fixed word.

        Return whether it is the first since the last line: logging each would fill the disk.
        """
        counted = self._counted((event, address_group(source) or source, reason))
        counted.count += times
        return counted.count == times

    def count_with_id(self, event: RefusalEvent, source: str, reason: str) -> str:
        """Count as ``count`` does, and return the correlation id that the line will have.

        The answers to all that one line counts name it by the same id.
        """
        self.count(event, source, reason)
        counted = self._counted((event, address_group(source) or source, reason))
        counted.correlation_id = counted.correlation_id or self._new_id()
        return counted.correlation_id

    def _counted(self, key: _Key) -> _Count:
        counts, most = (
            (self._authenticated, MAX_AUTHENTICATED)
            if key[0] in _AUTHENTICATED
            else (self._unauthenticated, MAX_UNAUTHENTICATED)
        )
        if key not in counts and len(counts) >= most:
            event, _, reason = key
            # Fixed words both: there are few of these.
            counts, key = self._others, (event, OTHERS, reason)
        return counts.setdefault(key, _Count())

    async def run(self) -> None:
        """Write what is due every second until cancelled, and then all that is left."""
        try:
            while True:
                self.loop.busy(self._interval_s + _ROUND_S)
                await asyncio.sleep(self._interval_s)
                self.write_due(_TURN_S)
        finally:
            self.write()

    def write_due(self, within_s: float = math.inf) -> None:
        """Write what was counted of each source that had no line for a minute, and forget idle sources.

        A disk that is slow leaves the rest for the next time, once this has taken ``within_s``.
        """
        now = self._monotonic()
        for counts in (self._authenticated, self._unauthenticated, self._others):
            for key in [key for key, counted in counts.items() if counted.due <= now]:
                if not counts[key].count:
                    del counts[key]
                elif self._written(key, counts[key]):
                    counts[key] = _Count(due=now + _PAUSE_S)
                else:
                    return
                if self._monotonic() - now > within_s:
                    return

    def write(self) -> None:
        """Write all that was counted; what cannot be written is kept and counted on."""
        for counts in (self._authenticated, self._unauthenticated, self._others):
            for counted in counts.values():
                counted.due = 0.0
        self.write_due()

    def _written(self, key: _Key, counted: _Count) -> bool:
        event, source, reason = key
        known_as = {"correlation_id": counted.correlation_id} if counted.correlation_id else {}
        try:
            self._audit.write_if_space(
                **known_as, event=event, source=source, reason=reason, count=counted.count
            )
        except AuditUnavailableError as error:
            if str(error) != self._unwritten:
                self._unwritten = str(error)
                self._log.error("refusals not recorded yet", reason=self._unwritten)
            return False
        self._unwritten = None
        return True
