"""Bounds the memory that callers' sessions take, per node and in all.

What is kept is JSON text, which takes as many bytes as it has. Must not know what it is for.
"""

from collections import Counter


class MemoryBudget:
    """The bytes in use. One node's sessions cannot use up what all nodes share."""

    def __init__(self, per_node: int, in_all: int) -> None:
        self._per_node = per_node
        self._in_all = in_all
        self._used: Counter[str] = Counter()
        self._total = 0

    @property
    def total(self) -> int:
        """The bytes in use."""
        return self._total

    def take(self, node_id: str, size: int) -> bool:
        """Count ``size`` bytes for the node, and return whether they fit; nothing is counted otherwise."""
        if self._used[node_id] + size > self._per_node or self._total + size > self._in_all:
            return False
        self._used[node_id] += size
        self._total += size
        return True

    def give_back(self, node_id: str, size: int) -> None:
        """Count ``size`` bytes less."""
        self._total -= size
        self._used[node_id] -= size
        if not self._used[node_id]:
            del self._used[node_id]
