"""Where the frames of a WebSocket begin and end in a stream (RFC 6455 section 5.2), and their budget.

Both ends count frames by it before a parser spends time on them. Must not judge: what is malformed passes
through as it came, and is the parser's to refuse.
"""

import struct
from typing import NamedTuple

from schemas.frames import MAX_FRAME_BYTES
from schemas.pacing import TokenBucket

_CONTROL = 0x08
_MASK, _LENGTH = 0x80, 0x7F
_LENGTH_IN_2_BYTES = 126
_MAX_IN_2_BYTES = 0xFFFF
_MASK_BYTES = 4
_WHOLE_TEXT = 0x81
_SHORT, _MEDIUM = struct.Struct("!BB"), struct.Struct("!BBH")
_LONG = struct.Struct("!BBQ")


class FrameHead(NamedTuple):
    """The first bytes of a frame, parsed.

    Attributes:
        is_control: a ping, a pong or a close.
        is_text: a whole text: masked as its sender has to, unfragmented, and without an extension.
        payload_bytes: how long the payload is announced to be; it may be as yet unsent, and enormous.
        head_bytes: how long the head itself is.
    """

    is_control: bool
    is_text: bool
    payload_bytes: int
    head_bytes: int


def text_frame_head(payload_bytes: int) -> bytes:
    """Return the head of a server's frame that holds a whole text of ``payload_bytes``."""
    if payload_bytes < _LENGTH_IN_2_BYTES:
        return _SHORT.pack(_WHOLE_TEXT, payload_bytes)
    if payload_bytes <= _MAX_IN_2_BYTES:
        return _MEDIUM.pack(_WHOLE_TEXT, _LENGTH_IN_2_BYTES, payload_bytes)
    return _LONG.pack(_WHOLE_TEXT, _LENGTH, payload_bytes)


class FrameBudget:
    """A rate of frames, and credits for those that the other end sends because of one of this end.

    For messages, fragments, pings and pongs alike; ``bytes_like_a_frame`` of a payload cost as much as one.
    A credit of size pays for payloads alone: what lets a large answer through lets no flood of small ones.
    """

    __slots__ = ("_bucket", "_bytes_like_a_frame", "_credit", "_credit_of_size", "_most_credit")

    def __init__(self, bucket: TokenBucket, *, bytes_like_a_frame: int, most_credit: float) -> None:
        self._bucket = bucket
        self._bytes_like_a_frame = bytes_like_a_frame
        self._most_credit = most_credit
        self._credit = self._credit_of_size = 0.0

    def expect(self, credit: float, of_size: float = 0.0) -> None:
        self._credit = min(self._most_credit, self._credit + credit)
        self._credit_of_size = min(self._most_credit, self._credit_of_size + of_size)

    def take(self, head: FrameHead, now: float) -> float:
        """Count a frame and return 0, or count nothing and return the seconds until it is within the rate."""
        cost = cost_of(head, self._bytes_like_a_frame)
        size = credit = 0.0
        if not head.is_control:  # which is no answer
            size = min(cost - 1.0, self._credit_of_size)
            credit = min(cost - size, self._credit)
        left = cost - size - credit
        if left > 0 and (wait_s := self._bucket.take(now, left)) > 0:
            return wait_s
        self._credit -= credit
        self._credit_of_size -= size
        return 0.0


def cost_of(head: FrameHead, bytes_like_a_frame: int) -> float:
    """Return what a frame costs: the parser rejects one over the limit at its head."""
    return 1.0 + min(head.payload_bytes, MAX_FRAME_BYTES) / bytes_like_a_frame


class FrameSlicer:
    """Cuts what comes into pieces that never reach beyond the frame that they belong to.

    ``is_masked``: from a client, which masks its frames.
    """

    __slots__ = ("_head", "_left", "_text", "_waiting")

    def __init__(self, *, is_masked: bool = True) -> None:
        self._text = (_WHOLE_TEXT, _MASK if is_masked else 0)
        self._waiting = bytearray()
        self._head: FrameHead | None = None
        self._left = 0

    @property
    def is_empty(self) -> bool:
        return not self._waiting

    @property
    def is_within(self) -> bool:
        """Whether the next bytes belong to a frame that was entered."""
        return self._left > 0

    def feed(self, data: bytes) -> None:
        self._waiting += data

    def head(self) -> FrameHead | None:
        """Return the head of the next frame; None while not all of the head is there."""
        if self._head is None:
            self._head = self._parsed_head()
        return self._head

    def _parsed_head(self) -> FrameHead | None:
        waiting = self._waiting
        if len(waiting) < 2:  # noqa: PLR2004 - the two bytes that every frame begins with
            return None
        first, second = waiting[0], waiting[1]
        length, size = second & _LENGTH, 2
        if length >= _LENGTH_IN_2_BYTES:
            extended = 2 if length == _LENGTH_IN_2_BYTES else 8
            size += extended
            if len(waiting) < size:
                return None
            length = int.from_bytes(waiting[2:size], "big")
        if second & _MASK:
            size += _MASK_BYTES
        is_text = (first, second & _MASK) == self._text
        return FrameHead(bool(first & _CONTROL), is_text, length, size)

    def beginning(self, head: FrameHead, most: int) -> bytes:
        """Return ``head`` as it came, with the first bytes of its payload: ``most``, or what is there."""
        return bytes(self._waiting[: head.head_bytes + min(most, head.payload_bytes)])

    def enter(self, head: FrameHead) -> None:
        """Let the frame that begins with ``head`` be taken."""
        self._head = None
        self._left = head.head_bytes + head.payload_bytes

    def take(self) -> bytes:
        """Return what is there of the frame that was entered, and forget it."""
        piece = bytes(self._waiting[: self._left])
        del self._waiting[: self._left]
        self._left -= len(piece)
        return piece
