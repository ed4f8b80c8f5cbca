"""Manifests that wait for their leaf: one a node, for half a minute, and a bounded number of bytes in all.

Whoever can write to the broker can make manifests wait; what he cannot do is fill the memory with them.
Must not look into them.
"""

from collections.abc import Callable
from dataclasses import dataclass

PARKED_FOR_MS = 30_000
MAX_PARKED_BYTES = 64 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class _Parked:
    wire: bytes
    until_ms: int


class PendingManifests:
    """What waits, by node id. ``given_up`` is called with the node of each that its leaf never came for."""

    def __init__(self, given_up: Callable[[str], object], max_bytes: int = MAX_PARKED_BYTES) -> None:
        self._given_up = given_up
        self._max_bytes = max_bytes
        self._bytes = 0
        self._parked: dict[str, _Parked] = {}

    def put(self, node_id: str, wire: bytes, now_ms: int) -> bool:
        """Let ``wire`` wait in the place of what waited for the same node; tell whether there was room."""
        before = self._remove(node_id)
        if before is not None and before.wire != wire:
            self._given_up(node_id)
        if self._bytes + len(wire) > self._max_bytes:
            self._given_up(node_id)
            return False
        self._bytes += len(wire)
        self._parked[node_id] = _Parked(wire, now_ms + PARKED_FOR_MS)
        return True

    def take(self, node_id: str, now_ms: int) -> bytes | None:
        """Return what waited for the leaf of ``node_id``, if it has not waited too long."""
        parked = self._remove(node_id)
        if parked is not None and parked.until_ms <= now_ms:
            self._given_up(node_id)
            return None
        return parked.wire if parked is not None else None

    def sweep(self, now_ms: int) -> None:
        """Forget what has waited too long."""
        for node_id in [key for key, parked in self._parked.items() if parked.until_ms <= now_ms]:
            self._remove(node_id)
            self._given_up(node_id)

    def _remove(self, node_id: str) -> _Parked | None:
        parked = self._parked.pop(node_id, None)
        if parked is not None:
            self._bytes -= len(parked.wire)
        return parked
