"""Removes the mask under which a client sends a frame's payload (RFC 6455 section 5.3).

By the WebSocket library's own code, which is in C where the library was built so: in Python it takes half as
long as to parse the text under the mask. Must not judge the payload.
"""

from websockets.frames import apply_mask  # type: ignore[attr-defined]  # imported there from one of two places

from schemas.websocket_frames import FrameHead

_MASK_BYTES = 4


def unmasked(frame: bytes, head: FrameHead) -> bytes:
    """Return what is there of the payload of ``frame``, which begins with ``head`` and is masked."""
    start = head.head_bytes
    if len(frame) <= start:
        return b""  # nor need all of the mask be there
    return apply_mask(frame[start:], frame[start - _MASK_BYTES : start])
