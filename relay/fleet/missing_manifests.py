"""Nodes that send heartbeats, and whose manifests the relay does not have.

That a broker holds back retained messages shows in the heartbeats alone. A heartbeat may overtake its
manifest, so only nodes that lack one for a minute count. Must not grow with what anyone publishes.
"""

from structlog.typing import FilteringBoundLogger

WINDOW_MS = 60_000
MAX_NODES = 10_000


class MissingManifests:
    """The nodes without a manifest; logged once a minute at most."""

    def __init__(self, log: FilteringBoundLogger) -> None:
        self._log = log
        self._nodes: set[str] = set()
        self._since_ms = 0

    def missed(self, node_id: str, now_ms: int) -> None:
        """Record that ``node_id`` is alive and has no manifest."""
        if not self._nodes:
            self._since_ms = now_ms
        if len(self._nodes) < MAX_NODES:
            self._nodes.add(node_id)
        if now_ms - self._since_ms < WINDOW_MS:
            return
        self._log.warning(
            "manifests are missing: does the broker hold back retained messages? see docs/brokers.md",
            nodes=len(self._nodes),
        )
        self._nodes.clear()

    def found(self, node_id: str) -> None:
        """Record that there is a manifest of ``node_id``."""
        self._nodes.discard(node_id)
