"""What the operator has decided, on its way to the audit: in order, and again after an error.

Must not delay a decision: it is in effect before it is recorded.
"""

from collections import deque

from structlog.typing import FilteringBoundLogger

from relay.audit.log import AuditLog, AuditUnavailableError

MAX_UNRECORDED = 10_000


class DecisionRecords:
    """Writes decisions to ``audit`` and ``log``."""

    def __init__(self, audit: AuditLog, log: FilteringBoundLogger) -> None:
        self._audit = audit
        self._log = log
        self._unrecorded: deque[dict[str, str]] = deque()
        self._unwritten: dict[str, str] | None = None

    def add(self, event: str, **facts: str) -> None:
        """Log a decision, and keep it for the audit."""
        self._log.warning(event, **facts)
        if len(self._unrecorded) >= MAX_UNRECORDED:
            self._log.error("not recorded", reason="too many are pending", what={"event": event, **facts})
            return
        self._unrecorded.append({"event": event, **facts})

    def write(self) -> None:
        """Write what is kept to the audit; after an error the rest waits for the next time."""
        while self._unrecorded:
            try:
                self._audit.write(**self._unrecorded[0])
            except AuditUnavailableError as error:
                if self._unwritten is not self._unrecorded[0]:
                    self._unwritten = self._unrecorded[0]
                    self._log.error("not recorded", reason=str(error), what=self._unwritten)
                return
            self._unrecorded.popleft()
