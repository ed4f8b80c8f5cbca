"""What is refused or dropped, in the audit as counted lines: the first within a second, then one a minute.

A line is for one source, event and reason; the addresses of one IPv6 subscriber are one source. However many
sources send however much, the lines of a minute are bounded: sources beyond that are counted together as
``others``. When little room is left on the disk nothing is written, and the counts are kept: that room is for
calls. Must not be used for calls: each of those has lines of its own.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from structlog.typing import FilteringBoundLogger

from relay.address_groups import address_group
from relay.audit.log import AuditLog, AuditUnavailableError

MAX_UNPROVEN = 120
"""As many lines a minute name a source that has proven nothing."""
MAX_PROVEN = 500
"""As many name a node or an agent that has proven who it is."""
OTHERS = "others"

_INTERVAL_S = 1.0
_PAUSE_S = 60.0
_PROVEN = frozenset({"frame_dropped", "session_broken", "identity_twice", "call_refused"})

_Key = tuple[str, str, str]


@dataclass(slots=True)
class _Count:
    """What was counted since the last line, and when there may be another."""

    count: int = 0
    due: float = 0.0


class RefusalCounter:
    """Counts, and writes what is due. ``monotonic`` is in seconds."""

    def __init__(
        self,
        audit: AuditLog,
        log: FilteringBoundLogger,
        monotonic: Callable[[], float],
        interval_s: float = _INTERVAL_S,
    ) -> None:
        self._interval_s = interval_s
        self._audit = audit
        self._log = log
        self._monotonic = monotonic
        # A source keeps its place for a minute after its line: there are no more lines a minute than places.
        self._unproven: dict[_Key, _Count] = {}
        self._proven: dict[_Key, _Count] = {}
        self._others: dict[_Key, _Count] = {}
        self._unwritten: str | None = None

    def count(self, event: str, source: str, reason: str, times: int = 1) -> bool:
        """Count ``event`` from ``source``, for ``reason``, which is a fixed word.

        Returns whether it is the first since the last line: a log that says it each time would fill the disk.

        | event | source |
        |---|---|
        | ``request_refused``, ``token_refused``, ``node_refused`` | the network address |
        | ``enrolment_refused`` | the network address |
        | ``identity_refused``, ``manifest_refused`` | the node whose topic or session it came on |
        | ``heartbeat_refused``, ``message_dropped`` | the node whose topic it came on |
        | ``frame_dropped``, ``session_broken``, ``identity_twice`` | the node |
        | ``call_refused`` | the agent |
        """
        counted = self._counted((event, address_group(source) or source, reason))
        counted.count += times
        return counted.count == times

    def _counted(self, key: _Key) -> _Count:
        counts, most = (self._proven, MAX_PROVEN) if key[0] in _PROVEN else (self._unproven, MAX_UNPROVEN)
        if key not in counts and len(counts) >= most:
            event, _, reason = key
            # Fixed words both: there are few of these.
            counts, key = self._others, (event, OTHERS, reason)
        return counts.setdefault(key, _Count())

    async def run(self) -> None:
        """Write every second what is due, until cancelled, and then all that is left."""
        try:
            while True:
                await asyncio.sleep(self._interval_s)
                self.write_due()
        finally:
            self.write()

    def write_due(self) -> None:
        """Write what was counted of each source that had no line for a minute, and forget who was quiet."""
        now = self._monotonic()
        for counts in (self._proven, self._unproven, self._others):
            for key in [key for key, counted in counts.items() if counted.due <= now]:
                if not counts[key].count:
                    del counts[key]
                elif self._written(key, counts[key].count):
                    counts[key] = _Count(due=now + _PAUSE_S)
                else:
                    return

    def write(self) -> None:
        """Write all that was counted; what cannot be written is kept and counted on."""
        for counts in (self._proven, self._unproven, self._others):
            for counted in counts.values():
                counted.due = 0.0
        self.write_due()

    def _written(self, key: _Key, count: int) -> bool:
        event, source, reason = key
        try:
            self._audit.write_if_space(event=event, source=source, reason=reason, count=count)
        except AuditUnavailableError as error:
            if str(error) != self._unwritten:
                self._unwritten = str(error)
                self._log.error("refusals not recorded yet", reason=self._unwritten)
            return False
        self._unwritten = None
        return True
