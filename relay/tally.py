"""What is refused or dropped, in the audit as one counted line for each source, reason and second.

A stranger can make the relay refuse as fast as he can send; what he cannot do is fill the disk with it.
Must not be used for calls: each of those has lines of its own.
"""

import asyncio
from collections import Counter

from structlog.typing import FilteringBoundLogger

from relay.audit import AuditLog, AuditUnavailableError

_INTERVAL_S = 1.0
_MAX_KEYS = 1000
_THE_REST = "others"


class Tally:
    """Counts until the second is over, then writes."""

    def __init__(self, audit: AuditLog, log: FilteringBoundLogger, interval_s: float = _INTERVAL_S) -> None:
        self._interval_s = interval_s
        self._audit = audit
        self._log = log
        self._counts: Counter[tuple[str, str, str]] = Counter()

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
        """
        key = (event, source, reason)
        if key not in self._counts and len(self._counts) >= _MAX_KEYS:
            key = (event, _THE_REST, reason)
        first = key not in self._counts
        self._counts[key] += times
        return first

    async def run(self) -> None:
        """Write once a second until cancelled, and then a last time."""
        try:
            while True:
                await asyncio.sleep(self._interval_s)
                self.write()
        finally:
            self.write()

    def write(self) -> None:
        """Write what was counted; what cannot be written is kept and counted on."""
        for key in list(self._counts):
            event, source, reason = key
            try:
                self._audit.write(event=event, source=source, reason=reason, count=self._counts[key])
            except AuditUnavailableError as error:
                self._log.error("refusals not recorded yet", reason=str(error))
                return
            del self._counts[key]
