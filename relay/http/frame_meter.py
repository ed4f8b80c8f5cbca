"""How many frames the other end of one WebSocket may send: a handful until its node is known, then a rate.

The one budget for all frames of a connection: messages, fragments, pings and pongs. It is asked before a
frame is parsed, since parsing is most of what a small frame costs. Must not wait, nor close anything: that is
``websocket_protocol``.
"""

import math
from collections.abc import Callable

from schemas.frames import MAX_FRAME_BYTES
from schemas.token_bucket import TokenBucket
from schemas.websocket_frames import FrameHead

METER_IN_SCOPE = "edge.frame_meter"
"""Where a connection's meter stands in the scope of its WebSocket."""

FRAMES_BEFORE_ADMISSION = 8.0
FRAMES_PER_S = 20.0
FRAMES_AT_ONCE = 120.0
_BYTES_LIKE_A_FRAME = 4096
_CREDIT_OF_A_COMMAND = 16.0
_MOST_CREDIT = 1024.0


class FrameMeter:
    """The budget of one connection. ``monotonic`` gives seconds that only ever go forward."""

    __slots__ = ("_bucket", "_credit", "_early", "_monotonic")

    def __init__(self, monotonic: Callable[[], float]) -> None:
        self._monotonic = monotonic
        self._early = FRAMES_BEFORE_ADMISSION
        self._bucket: TokenBucket | None = None
        self._credit = 0.0

    @property
    def is_admitted(self) -> bool:
        """Whether the node is known."""
        return self._bucket is not None

    def admit(self) -> None:
        """Allow what a node may send, from now on."""
        self._bucket = TokenBucket(FRAMES_PER_S, FRAMES_AT_ONCE, self._monotonic())

    def expect_answer(self) -> None:
        """Allow the answer to a command, however many commands there are."""
        self._credit = min(_MOST_CREDIT, self._credit + _CREDIT_OF_A_COMMAND)

    def take(self, head: FrameHead) -> float:
        """Count a frame and return 0, or count nothing and return in how many seconds it may be parsed.

        Infinity where the connection is to be cut off: a stranger that says more than a handful, and a node
        that exceeds its rate by control frames. They carry nothing that is worth waiting for.
        """
        # What is longer than the longest message is refused by the parser, at its head.
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
