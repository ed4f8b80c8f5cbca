"""What has changed in each tenant's fleet, as this relay has seen it: a bounded history since its start.

Must not notify: ``change_notifier`` does. Must not decide what a change is: ``node_index`` and the fleet do.
"""

from collections import defaultdict, deque
from enum import StrEnum
from typing import NamedTuple

KEPT = 1000
"""How many changes of a tenant are kept; the oldest is dropped first."""


class NodeChange(StrEnum):
    """What happened to a node."""

    CAME = "came"
    """Its tools are listed, and were not."""
    WENT = "went"
    """Its tools are not listed any more."""
    CHANGED = "changed"
    """It has other tools, or tools with other limits."""
    RENAMED = "renamed"
    """The operator has changed its label."""
    TAGGED = "tagged"
    """The operator has changed its tags alone."""


class FleetChange(NamedTuple):
    """One change of one node."""

    at_ms: int
    node_id: str
    what: NodeChange


class _History:
    __slots__ = ("changes", "complete_since_ms")

    def __init__(self, complete_since_ms: int) -> None:
        self.changes: deque[FleetChange] = deque(maxlen=KEPT)
        self.complete_since_ms = complete_since_ms


class FleetChanges:
    """The changes that one relay has seen since ``started_ms``."""

    def __init__(self, started_ms: int) -> None:
        self._histories: defaultdict[str, _History] = defaultdict(lambda: _History(started_ms))
        self._started_ms = started_ms

    def record(self, tenant: str, change: FleetChange) -> None:
        """Add ``change``, which is the newest of ``tenant``."""
        history = self._histories[tenant]
        if len(history.changes) == KEPT:
            history.complete_since_ms = history.changes[0].at_ms + 1
        history.changes.append(change)

    def since(self, tenant: str, since_ms: int) -> list[FleetChange]:
        """Return the changes of ``tenant`` from ``since_ms`` on that are kept, oldest first."""
        history = self._histories.get(tenant)
        return [] if history is None else [change for change in history.changes if change.at_ms >= since_ms]

    def complete_since_ms(self, tenant: str) -> int:
        """Return from when on no change of ``tenant`` is missing."""
        history = self._histories.get(tenant)
        return self._started_ms if history is None else history.complete_since_ms
