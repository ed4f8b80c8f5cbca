"""uvicorn's WebSocket protocol with limits: what a stranger, or a node, may make this process hold.

uvicorn bounds frames, but neither how many come before they are looked at, nor answers that nobody reads.
Must not look into what it bounds.
"""

from typing import Any

from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

ADMITTED_IN_SCOPE = "edge.admitted"
"""Set in a WebSocket's scope once its node is known: from then on it may send more."""

MAX_BYTES_BEFORE_ADMISSION = 32 * 1024
MAX_UNREAD_BYTES = 1024 * 1024
MAX_FRAGMENTS = 64
MAX_QUEUED_FRAMES = 1024


class BoundedWebSocket(WebSocketsSansIOProtocol):
    """A WebSocket that a stranger cannot fill, and that ends when its time is up, read or not."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._early_bytes = 0

    def data_received(self, data: bytes) -> None:
        """Take what came, of a stranger only so much."""
        if not getattr(self, "scope", {}).get(ADMITTED_IN_SCOPE):
            self._early_bytes += len(data)
            if self._early_bytes > MAX_BYTES_BEFORE_ADMISSION:
                self.transport.abort()
                return
        super().data_received(data)
        if len(self.frames) > MAX_FRAGMENTS or self.queue.qsize() > MAX_QUEUED_FRAMES:
            self.transport.abort()

    def handle_ping(self) -> None:
        """Answer, unless the answers before have not been read."""
        super().handle_ping()
        if self.transport.get_write_buffer_size() > MAX_UNREAD_BYTES:
            self.transport.abort()

    def keepalive_timeout(self) -> None:
        """End: closing alone would wait until everything was read, by somebody who does not read."""
        super().keepalive_timeout()
        self.transport.abort()
