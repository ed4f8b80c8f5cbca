import pytest
from websockets.frames import Frame, Opcode

from relay.http.masks import unmasked
from schemas.websocket_frames import FrameHead, FrameSlicer


def cut(data: bytes, most: int = 1 << 20) -> tuple[bytes, FrameHead]:
    """Return what is there of the frame that ``data`` begins with, at most so much of its payload."""
    slicer = FrameSlicer()
    slicer.feed(data)
    head = slicer.head()
    assert head is not None
    return slicer.beginning(head, most), head


def frame_of(payload: bytes) -> bytes:
    return Frame(Opcode.TEXT, payload).serialize(mask=True)


@pytest.mark.parametrize("size", [0, 1, 125, 126, 127, 65_535, 65_536])
def test_a_payload_is_unmasked_as_the_library_masks_it(size: int) -> None:
    payload = bytes(number % 251 for number in range(size))
    assert unmasked(*cut(frame_of(payload))) == payload


@pytest.mark.parametrize("payload", [b"a text of a client", b"short"])
def test_a_beginning_does_not_reach_into_the_next_frame(payload: bytes) -> None:
    assert unmasked(*cut(frame_of(payload) + frame_of(b"next"), most=7)) == payload[:7]


@pytest.mark.parametrize("there", range(2, 10))
def test_of_a_payload_that_has_begun_to_arrive_is_returned_what_is_there(there: int) -> None:
    # Two bytes of the head, and four of the mask.
    assert unmasked(*cut(frame_of(b"text")[:there])) == b"text"[: max(0, there - 6)]
