"""When each of many things is to be examined again: the earliest time first, and one time for each.

A time that moves later costs nothing: the earlier one stays in the queue, and when it has come, the later one
is queued. Must not read a clock.
"""

from collections.abc import Iterator
from heapq import heapify, heappop, heappush

_SPARE = 64


class DueTimes:
    """A queue of names by time. It never holds more than twice as many entries as names, and ``_SPARE``."""

    def __init__(self) -> None:
        self._due_ms: dict[str, int] = {}
        self._heap: list[tuple[int, str]] = []

    def __len__(self) -> int:
        return len(self._heap)

    def no_later_than(self, name: str, due_ms: int) -> None:
        """Have ``name`` come due at ``due_ms``, or when it does already if that is earlier."""
        queued_ms = self._due_ms.get(name)
        if queued_ms is not None and queued_ms <= due_ms:
            return
        self._due_ms[name] = due_ms
        heappush(self._heap, (due_ms, name))
        if len(self._heap) > 2 * len(self._due_ms) + _SPARE:
            self._heap = [(due_ms, name) for name, due_ms in self._due_ms.items()]
            heapify(self._heap)

    def take(self, now_ms: int) -> Iterator[str]:
        """Yield each name that is due, and forget its time."""
        while self._heap and self._heap[0][0] <= now_ms:
            due_ms, name = heappop(self._heap)
            if self._due_ms.get(name) == due_ms:
                del self._due_ms[name]
                yield name
