"""uvicorn's protocols with an end to their patience: what a stranger may make this process hold.

uvicorn bounds bodies and frames, but not what comes before them: a head that never ends, frames that come
faster than they are looked at, answers that nobody reads. Must not look into what it bounds.
"""

from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

ADMITTED_IN_SCOPE = "edge.admitted"
"""Set in a WebSocket's scope once its node is known: from then on it may send more."""

MAX_HEAD_BYTES = 64 * 1024
MAX_BYTES_BEFORE_ADMISSION = 32 * 1024
MAX_UNREAD_BYTES = 1024 * 1024
MAX_FRAGMENTS = 64
MAX_QUEUED_FRAMES = 1024


class BoundedHttp(HttpToolsProtocol):
    """HTTP whose request line and headers end, or the connection does."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._head_bytes = 0
        self._in_head = False

    def data_received(self, data: bytes) -> None:
        """Take what came, and give up on a head that does not end."""
        super().data_received(data)
        if self._in_head:
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES:
                self.transport.abort()

    def on_message_begin(self) -> None:
        """Note that a head begins."""
        self._in_head, self._head_bytes = True, 0
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """Note that the head is over."""
        self._in_head = False
        super().on_headers_complete()


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
