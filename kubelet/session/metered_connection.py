"""A WebSocket to the relay that counts frames before they are parsed: no relay may exhaust a node.

A relay that keeps to the limits that its node has announced stays below the rate here. What exceeds it ends
the connection. So does silence: the relay pings, and a node that is not pinged has lost it. The node sends no
pings of its own, which thousands of nodes would make the relay answer. Must not know what a frame means.
"""

import asyncio
from typing import Any

from websockets.asyncio.client import ClientConnection
from websockets.client import ClientProtocol
from websockets.protocol import State

from schemas.frames import MAX_FRAME_BYTES
from schemas.token_bucket import TokenBucket
from schemas.websocket_frames import FrameSlicer

_FRAMES_PER_S = 100.0
"""Twenty, and sixteen messages a second to local agents, of the largest size."""
_FRAMES_AT_ONCE = 440.0
"""A hundred and twenty, and all sessions of callers, each of the largest size, after a reconnect."""
_FRAMES_OF_A_COMMAND = 6.0
"""A command of the largest size, and its cancellation."""
_FRAMES_OF_AN_ANSWER = 5.0
"""An answer of the largest size to a request of a local agent."""
_MOST_CREDIT = 1024 * _FRAMES_OF_AN_ANSWER
_BYTES_LIKE_A_FRAME = 65_536

SILENCE_S = 30.0
"""How long a relay may send nothing: two of its pings."""

_END_OF_HEAD = b"\r\n\r\n"


class MeteredConnection(ClientConnection):
    """A connection of a node that accepts ``commands_per_s``, and as many at once.

    Attributes:
        is_flooded: whether it was closed because it exceeded the rate.
        heard_at: when the relay last sent anything, by the event loop's clock.
    """

    def __init__(
        self, protocol: ClientProtocol, *, commands_per_s: float, silence_s: float = SILENCE_S, **options: Any
    ) -> None:
        super().__init__(protocol, **options)
        commands = _FRAMES_OF_A_COMMAND * commands_per_s
        self._bucket = TokenBucket(_FRAMES_PER_S + commands, _FRAMES_AT_ONCE + commands, self.loop.time())
        self._slicer = FrameSlicer()
        self._end_of_head = b""
        self._credit = 0.0
        self._silence_s = silence_s
        self.heard_at = self.loop.time()
        self._silence_check: asyncio.TimerHandle | None = None
        self.is_flooded = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin, and expect the relay's pings."""
        super().connection_made(transport)
        self._check_silence()

    def connection_lost(self, exc: Exception | None) -> None:
        """End."""
        if self._silence_check is not None:
            self._silence_check.cancel()
        super().connection_lost(exc)

    def _check_silence(self) -> None:
        """Abort if nothing came for too long; else check again when that could be."""
        # One timer, which a message does not move: it finds out when it fires.
        left_s = self.heard_at + self._silence_s - self.loop.time()
        if left_s > 0:
            self._silence_check = self.loop.call_later(left_s, self._check_silence)
        else:
            self.transport.abort()

    def data_received(self, data: bytes) -> None:
        """Parse what came frame by frame, as far as the rate goes."""
        self.heard_at = self.loop.time()
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
            if not self._affords(cost):
                self.is_flooded = True
                self.transport.abort()
                return b""
            self._slicer.enter(head)
        return self._slicer.take()

    def expect_answer(self) -> None:
        """Accept one frame more, beyond the rate: this node has requested it."""
        self._credit = min(_MOST_CREDIT, self._credit + _FRAMES_OF_AN_ANSWER)

    def _affords(self, cost: float) -> bool:
        """Count ``cost`` and return whether it is within the rate, or was expected."""
        if self._bucket.take(self.loop.time(), cost) == 0:
            return True
        if self._credit < cost:
            return False
        self._credit -= cost
        return True
