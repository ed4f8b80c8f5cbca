"""Messages on their way from the broker library's thread to the event loop: bounded in number and in bytes.

Must not look into them, and must not drop any: a full inbox lets the broker wait.
"""

import threading
from collections import deque
from collections.abc import Callable

Message = tuple[str, bytes]
"""A topic and what was said on it."""


class Inbox:
    """A queue between two threads. ``arrived`` is called by the one that puts, after each message."""

    def __init__(self, arrived: Callable[[], None], max_messages: int, max_bytes: int) -> None:
        self._arrived = arrived
        self._max_messages = max_messages
        self._max_bytes = max_bytes
        self._messages: deque[Message] = deque()
        self._bytes = 0
        self._closed = False
        self._changed = threading.Condition()

    def put(self, topic: str, payload: bytes) -> None:
        """Add a message, once there is room: an empty inbox has room for any. After ``close``, drop it."""
        size = len(topic) + len(payload)
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._has_room(size))
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
        """Take no more, and let go who waits for room."""
        with self._changed:
            self._closed = True
            self._messages.clear()
            self._changed.notify_all()

    def _has_room(self, size: int) -> bool:
        if not self._messages:
            return True
        return len(self._messages) < self._max_messages and self._bytes + size <= self._max_bytes
