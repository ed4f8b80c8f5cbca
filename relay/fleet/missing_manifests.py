"""Nodes that are alive at the broker, and whose manifests the relay does not have.

A broker that holds back retained messages does not say so; the heartbeats do. A heartbeat may overtake its
manifest, so what counts is who is still without one after a minute. Must not grow with what strangers write.
"""

from structlog.typing import FilteringBoundLogger

WINDOW_MS = 60_000
MOST_NODES = 10_000


class MissingManifests:
    """Who is missed since when; told once a minute at most."""

    def __init__(self, log: FilteringBoundLogger) -> None:
        self._log = log
        self._nodes: set[str] = set()
        self._since_ms = 0

    def missed(self, node_id: str, now_ms: int) -> None:
        """Note that ``node_id`` lives, and has no manifest."""
        if not self._nodes:
            self._since_ms = now_ms
        if len(self._nodes) < MOST_NODES:
            self._nodes.add(node_id)
        if now_ms - self._since_ms < WINDOW_MS:
            return
        self._log.warning(
            "manifests are missing: does the broker hold back retained messages? see docs/brokers.md",
            nodes=len(self._nodes),
        )
        self._nodes.clear()

    def found(self, node_id: str) -> None:
        """Note that there is a manifest of ``node_id``."""
        self._nodes.discard(node_id)
