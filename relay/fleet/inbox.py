"""A queue of messages from the broker library's thread to the event loop, bounded in number and in bytes.

Must not read them, and must not drop any: while the inbox is full, the broker waits.
"""

import threading
from collections import deque
from collections.abc import Callable

Message = tuple[str, bytes]
"""A topic and a payload."""


class Inbox:
    """A queue between two threads. ``arrived`` is called in the thread that puts, after each message."""

    def __init__(self, arrived: Callable[[], None], max_messages: int, max_bytes: int) -> None:
        self._arrived = arrived
        self._max_messages = max_messages
        self._max_bytes = max_bytes
        self._messages: deque[Message] = deque()
        self._bytes = 0
        self._closed = False
        self._changed = threading.Condition()

    def put(self, topic: str, payload: bytes) -> None:
        """Add a message; block while it does not fit. Any fits into an empty inbox; none after ``close``."""
        size = len(topic) + len(payload)
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._fits(size))
            if self._closed:
                return
            self._messages.append((topic, payload))
            self._bytes += size
        self._arrived()

    def take(self) -> Message | None:
        """Return the oldest message; None when there is none. Never waits."""
        with self._changed:
            if not self._messages:
                return None
            topic, payload = self._messages.popleft()
            self._bytes -= len(topic) + len(payload)
            self._changed.notify_all()
            return topic, payload

    def close(self) -> None:
        """Accept no more messages, and release a thread that is blocked in ``put``."""
        with self._changed:
            self._closed = True
            self._messages.clear()
            self._changed.notify_all()

    def _fits(self, size: int) -> bool:
        if not self._messages:
            return True
        return len(self._messages) < self._max_messages and self._bytes + size <= self._max_bytes
