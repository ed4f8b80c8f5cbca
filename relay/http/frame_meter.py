"""Limits the frames that a peer may send on one WebSocket: a few until its node is admitted, then a rate.

One budget for all frames of a connection: messages, fragments, pings and pongs. It is consulted before a
frame is parsed, since parsing is most of the cost of a small frame. Must not wait or close:
``websocket_protocol`` does.
"""

import math
from collections.abc import Callable

from schemas.frames import MAX_FRAME_BYTES
from schemas.token_bucket import TokenBucket
from schemas.websocket_frames import FrameHead

METER_IN_SCOPE = "edge.frame_meter"
"""The key of a connection's meter in the scope of its WebSocket."""

FRAMES_BEFORE_ADMISSION = 8.0
FRAMES_PER_S = 20.0
FRAMES_AT_ONCE = 120.0
CREDIT_OF_A_COMMAND = 16.0
_BYTES_LIKE_A_FRAME = 4096
_MOST_CREDIT = 1024.0


class FrameMeter:
    """The budget of one connection. ``monotonic`` is in seconds."""

    __slots__ = ("_bucket", "_credit", "_early", "_monotonic")

    def __init__(self, monotonic: Callable[[], float]) -> None:
        self._monotonic = monotonic
        self._early = FRAMES_BEFORE_ADMISSION
        self._bucket: TokenBucket | None = None
        self._credit = 0.0

    @property
    def is_admitted(self) -> bool:
        """Whether the node is admitted."""
        return self._bucket is not None

    def admit(self) -> None:
        """Apply the rate of a node from now on."""
        self._bucket = TokenBucket(FRAMES_PER_S, FRAMES_AT_ONCE, self._monotonic())

    def expect_answer(self, credit: float = CREDIT_OF_A_COMMAND) -> None:
        """Add credit for what the node sends because of a frame of the relay; by default, for one command."""
        self._credit = min(_MOST_CREDIT, self._credit + credit)

    def take(self, head: FrameHead) -> float:
        """Count a frame and return 0, or count nothing and return in how many seconds it may be parsed.

        Infinity if the connection is to be aborted: more than a few frames came before authentication, or
        a node exceeds its rate with control frames, which carry no data worth a delay.
        """
        # The parser rejects a longer frame at its head.
        cost = 1.0 + min(head.payload_bytes, MAX_FRAME_BYTES) / _BYTES_LIKE_A_FRAME
        if self._bucket is None:
            if cost > self._early:
                return math.inf
            self._early -= cost
            return 0.0
        credit = 0.0 if head.is_control else min(cost, self._credit)
        if cost > credit and (wait_s := self._bucket.take(self._monotonic(), cost - credit)) > 0:
            return math.inf if head.is_control else wait_s
        self._credit -= credit
        return 0.0
