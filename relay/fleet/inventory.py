"""Whether the broker sends what it should: manifests that it retains, and those that heartbeats belong to.

A broker can lose retained messages, or silently hold most of them back from a new subscriber. What it has not
sent shows against the persisted marks: each node with one has announced itself before. Must not judge
manifests.
"""

from collections.abc import Callable
from typing import NamedTuple

from attrs import Factory, define, field
from structlog.typing import FilteringBoundLogger

from relay.fleet.node_index import NodeIndex
from relay.observability.metrics import Metrics
from schemas.manifest import etag_of
from schemas.times import ValidityClock

WINDOW_MS = 60_000
MAX_NODES = 10_000


@define(eq=False, repr=False)
class MissingManifests:
    """Nodes that send heartbeats and whose manifests the relay lacks; logged once a minute at most.

    A heartbeat may overtake its manifest: only nodes that lack one for a minute count.
    """

    _log: FilteringBoundLogger
    _nodes: set[str] = field(init=False, factory=set)
    _since_ms: int = field(init=False, default=0)

    def missed(self, node_id: str, now_ms: int) -> None:
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
        self._nodes.discard(node_id)


PENDING_FOR_MS = 30_000
MAX_PENDING_BYTES = 64 * 1024 * 1024


class _Pending(NamedTuple):
    wire: bytes
    until_ms: int


@define(eq=False, repr=False)
class PendingManifests:
    """Manifests whose leaf is not known yet: one for each node, for half a minute, within ``max_bytes``.

    Anyone who can publish to the broker can make manifests wait: the bound protects the memory.
    ``dropped`` is called with the node of each whose leaf did not arrive.
    """

    _dropped: Callable[[str], object]
    _max_bytes: int = MAX_PENDING_BYTES
    _bytes: int = field(init=False, default=0)
    # All wait equally long: the first is the one that expires first.
    _pending: dict[str, _Pending] = field(init=False, factory=dict)

    def __contains__(self, node_id: str) -> bool:
        return node_id in self._pending

    def put(self, node_id: str, wire: bytes, now_ms: int) -> bool:
        """Keep ``wire`` in place of the node's pending one; return False if the bound does not permit it."""
        before = self._remove(node_id)
        if before is not None and before.wire != wire:
            self._dropped(node_id)
        if self._bytes + len(wire) > self._max_bytes:
            self._dropped(node_id)
            return False
        self._bytes += len(wire)
        self._pending[node_id] = _Pending(wire, now_ms + PENDING_FOR_MS)
        return True

    def take(self, node_id: str, now_ms: int) -> bytes | None:
        """Remove and return the pending manifest of ``node_id``, unless it has expired."""
        pending = self._remove(node_id)
        if pending is not None and pending.until_ms <= now_ms:
            self._dropped(node_id)
            return None
        return pending.wire if pending is not None else None

    def sweep(self, now_ms: int) -> None:
        while self._pending:
            node_id, pending = next(iter(self._pending.items()))
            if pending.until_ms > now_ms:
                return
            self._remove(node_id)
            self._dropped(node_id)

    def _remove(self, node_id: str) -> _Pending | None:
        pending = self._pending.pop(node_id, None)
        if pending is not None:
            self._bytes -= len(pending.wire)
        return pending


@define(eq=False, repr=False, slots=False)
class Inventory:
    """What one broker has sent, compared with what is known."""

    _nodes: NodeIndex
    _metrics: Metrics
    _now_ms: ValidityClock
    _log: FilteringBoundLogger
    _missing: MissingManifests = field(
        init=False, default=Factory(lambda self: MissingManifests(self._log), takes_self=True)
    )
    _subscription: int = field(init=False, default=0)
    _awaited: set[str] = field(init=False, factory=set)

    def __attrs_post_init__(self) -> None:
        self._metrics.inventory_missing.set_function(self.missing)

    def heartbeat(self, node_id: str, etag: str) -> None:
        """Count a heartbeat. It is not signed: no expiry moves, and nothing is listed by it."""
        node = self._nodes.get(node_id)
        current = node.manifest.etag if node is not None and node.manifest is not None else None
        self._metrics.heartbeats("fits" if current == etag else "unknown_manifest").inc()
        # A rejected manifest has arrived, and the log has the reason.
        if current is None and not (node is not None and node.rejected):
            self._missing.missed(node_id, self._now_ms())

    def found(self, node_id: str) -> None:
        self._missing.found(node_id)

    def subscribed(self) -> None:
        """Record that the broker was subscribed to: from now on it sends what it retains."""
        self._subscription += 1
        # Every node is read, once for each time that the broker sends the announces of them all.
        self._awaited = {node.node_id for node in self._nodes if self._nodes.is_expected(node)}

    @property
    def is_subscribed(self) -> bool:
        return self._subscription > 0

    @property
    def is_there(self) -> bool:
        """Whether what was known at the subscription has arrived from the broker, or what came by ``check``.

        What is missing after that is not expected any more: nodes that are gone, or that the broker has lost.
        """
        return self.is_subscribed and not self._awaited

    def received(self, node_id: str, wire: bytes) -> None:
        """Record that the broker sent ``wire`` as the announce of ``node_id``, whatever it is worth."""
        self._awaited.discard(node_id)
        node = self._nodes.get(node_id)
        if node is not None:
            node.received_in = self._subscription
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
        return self.known() - self._nodes.counts.received_in(self._subscription)

    def check(self) -> None:
        """Log what is missing, once what is retained has had time to arrive."""
        self._awaited.clear()
        if missing := self.missing():
            self._log.warning(
                "the broker has not sent all manifests that were known; see docs/brokers.md",
                missing=missing,
                known=self.known(),
            )
