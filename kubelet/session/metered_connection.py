"""A WebSocket to the relay that counts frames before they are parsed: no relay may exhaust a node.

A relay that keeps to the limits that its node has announced stays below the rate here. What exceeds it ends
the connection. Must not know what a frame means.
"""

from typing import Any

from websockets.asyncio.client import ClientConnection
from websockets.client import ClientProtocol
from websockets.protocol import State

from schemas.frames import MAX_FRAME_BYTES
from schemas.token_bucket import TokenBucket
from schemas.websocket_frames import FrameSlicer

_FRAMES_PER_S = 20.0
_FRAMES_AT_ONCE = 120.0
_FRAMES_OF_A_COMMAND = 6.0
"""A command of the largest size, and its cancellation."""
_BYTES_LIKE_A_FRAME = 65_536

_END_OF_HEAD = b"\r\n\r\n"


class MeteredConnection(ClientConnection):
    """A connection of a node that accepts ``commands_per_s``, and as many at once.

    Attributes:
        is_flooded: whether it was closed because it exceeded the rate.
    """

    def __init__(self, protocol: ClientProtocol, *, commands_per_s: float, **options: Any) -> None:
        super().__init__(protocol, **options)
        commands = _FRAMES_OF_A_COMMAND * commands_per_s
        self._bucket = TokenBucket(_FRAMES_PER_S + commands, _FRAMES_AT_ONCE + commands, self.loop.time())
        self._slicer = FrameSlicer()
        self._end_of_head = b""
        self.is_flooded = False

    def data_received(self, data: bytes) -> None:
        """Parse what came frame by frame, as far as the rate goes."""
        if self.protocol.state is State.CONNECTING:
            data = self._after_response(data)
        self._slicer.feed(data)
        while not self.is_flooded and (piece := self._next_piece()):
            super().data_received(piece)

    def _after_response(self, data: bytes) -> bytes:
        """Parse the response to the upgrade, and return what comes after it."""
        seen = self._end_of_head + data
        end = seen.find(_END_OF_HEAD)
        rest = seen[end + len(_END_OF_HEAD) :] if end >= 0 else b""
        self._end_of_head = seen[-len(_END_OF_HEAD) + 1 :]
        super().data_received(data[: len(data) - len(rest)])
        if rest and self.protocol.state is State.CONNECTING:
            super().data_received(rest)  # the body of a refusal
            return b""
        return rest

    def _next_piece(self) -> bytes:
        """Return what is there of the next frame, or of the one before; nothing when it exceeds the rate."""
        head = None if self._slicer.is_within else self._slicer.head()
        if head is not None:
            # What is longer than the longest message is refused by the parser, at its head.
            cost = 1.0 + min(head.payload_bytes, MAX_FRAME_BYTES) / _BYTES_LIKE_A_FRAME
            if self._bucket.take(self.loop.time(), cost) > 0:
                self.is_flooded = True
                self.transport.abort()
                return b""
            self._slicer.enter(head)
        return self._slicer.take()
