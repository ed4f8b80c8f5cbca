"""Manifests whose leaf is not known yet: one for each node, for half a minute, and a bounded number of bytes.

Anyone who can publish to the broker can make manifests wait; the bound keeps them from filling the memory.
Must not parse them.
"""

from collections.abc import Callable
from dataclasses import dataclass

PENDING_FOR_MS = 30_000
MAX_PENDING_BYTES = 64 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class _Pending:
    wire: bytes
    until_ms: int


class PendingManifests:
    """Pending manifests by node id. ``dropped`` is called with the node of each whose leaf did not arrive."""

    def __init__(self, dropped: Callable[[str], object], max_bytes: int = MAX_PENDING_BYTES) -> None:
        self._dropped = dropped
        self._max_bytes = max_bytes
        self._bytes = 0
        # All wait equally long: the first is the one that expires first.
        self._pending: dict[str, _Pending] = {}

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
        """Drop what has expired."""
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
