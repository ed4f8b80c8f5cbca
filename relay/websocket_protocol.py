"""uvicorn's WebSocket protocol with limits: what a stranger, or a node, may make this process hold.

uvicorn bounds frames, but neither how many come before they are looked at, nor answers that nobody reads.
Must not look into what it bounds.
"""

from typing import Any

from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

from relay.connections import connection_in

ADMITTED_IN_SCOPE = "edge.admitted"
"""Set in a WebSocket's scope once its node is known: from then on it may send more."""

MAX_BYTES_BEFORE_ADMISSION = 32 * 1024
MAX_UNREAD_BYTES = 1024 * 1024
MAX_FRAGMENTS = 64
MAX_QUEUED_FRAMES = 1024

_BAD_REQUEST = b"HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"


class BoundedWebSocket(WebSocketsSansIOProtocol):
    """A WebSocket that a stranger cannot fill, and that ends when its time is up, read or not."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._connection = connection_in(self.app_state)
        self._early_bytes = 0

    def connection_lost(self, exc: Exception | None) -> None:
        """End."""
        self._connection.end()
        super().connection_lost(exc)

    def shutdown(self) -> None:
        """Say that the relay ends, unless this connection does already: nothing may be said then."""
        if not self.transport.is_closing():
            super().shutdown()

    def data_received(self, data: bytes) -> None:
        """Take what came, of a stranger only so much."""
        if not getattr(self, "scope", {}).get(ADMITTED_IN_SCOPE):
            self._early_bytes += len(data)
            if self._early_bytes > MAX_BYTES_BEFORE_ADMISSION:
                self.transport.abort()
                return
        super().data_received(data)
        if not self.handshake_initiated and self.conn.handshake_exc is not None:
            # httptools had let it pass, websockets does not, and uvicorn does not ask: it would never end.
            self.transport.write(_BAD_REQUEST)
            self.transport.close()
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
