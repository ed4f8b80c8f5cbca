"""Whether the broker sends what it should: manifests that it retains, and those that heartbeats belong to.

A broker can lose retained messages, or silently hold most of them back from a new subscriber. What it has not
sent shows against the persisted marks: each node with one has announced itself before. Must not judge
manifests.
"""

from collections.abc import Callable

from structlog.typing import FilteringBoundLogger

from relay.fleet.missing_manifests import MissingManifests
from relay.fleet.node_index import NodeIndex
from relay.fleet.node_record import NodeRecord
from relay.observability.metrics import Metrics
from schemas.manifest import etag_of


class Inventory:
    """What one broker has sent, compared with what is known."""

    def __init__(
        self, nodes: NodeIndex, metrics: Metrics, now_ms: Callable[[], int], log: FilteringBoundLogger
    ) -> None:
        self._nodes = nodes
        self._metrics = metrics
        self._now_ms = now_ms
        self._log = log
        self._missing = MissingManifests(log)
        self._subscription = 0
        self._awaited: set[str] = set()
        metrics.inventory_missing.set_function(self.missing)

    def heartbeat(self, node_id: str, etag: str) -> None:
        """Count a heartbeat. It is not signed: no expiry moves, and nothing is listed by it."""
        node = self._nodes.get(node_id)
        current = node.manifest.etag if node is not None and node.manifest is not None else None
        self._metrics.heartbeats("fits" if current == etag else "unknown_manifest").inc()
        # A rejected manifest has arrived, and the log has the reason.
        if current is None and not (node is not None and node.rejected):
            self._missing.missed(node_id, self._now_ms())

    def found(self, node_id: str) -> None:
        """Record that a manifest of ``node_id`` is in force."""
        self._missing.found(node_id)

    def subscribed(self) -> None:
        """Record that the broker was subscribed to: from now on it sends what it retains."""
        self._subscription += 1
        # Every node is read, once for each time that the broker sends the announces of them all.
        self._awaited = {node.node_id for node in self._nodes if self._is_expected(node)}

    @property
    def is_subscribed(self) -> bool:
        """Whether a broker was ever subscribed to."""
        return self._subscription > 0

    @property
    def is_there(self) -> bool:
        """Whether what was known at the subscription has arrived from the broker, or what came by ``check``.

        What is missing after that is not expected any more: nodes that are gone, or that the broker has lost.
        """
        return self.is_subscribed and not self._awaited

    def announced(self, node_id: str, wire: bytes) -> None:
        """Record that the broker sent ``wire`` as the announce of ``node_id``, whatever it is worth."""
        self._awaited.discard(node_id)
        node = self._nodes.get(node_id)
        if node is not None:
            node.announced_in = self._subscription
            node.broker_etag = etag_of(wire)
            self._nodes.update(node, self._now_ms())

    def etag_by_broker(self, node_id: str) -> str | None:
        """Return the ETag of what the broker sent last as the announce of ``node_id``; None of nothing."""
        node = self._nodes.get(node_id)
        return node.broker_etag if node is not None else None

    def known(self) -> int:
        """Return how many nodes have announced themselves and are not retired."""
        return self._nodes.counts.expected

    def missing(self) -> int:
        """Return of how many nodes that announced themselves before the broker has not sent an announce."""
        return self.known() - self._nodes.counts.announced_in(self._subscription)

    def check(self) -> None:
        """Log what is missing, once what is retained has had time to arrive."""
        self._awaited.clear()
        if missing := self.missing():
            self._log.warning(
                "the broker has not sent all manifests that were known; see docs/brokers.md",
                missing=missing,
                known=self.known(),
            )

    def _is_expected(self, node: NodeRecord) -> bool:
        return node.mark is not None and node.node_id not in self._nodes.retired
