from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from websockets.frames import Frame, Opcode

from schemas.websocket_frames import FrameHead, FrameSlicer, text_frame_head

SIZES = [0, 1, 125, 126, 127, 65_535, 65_536]


def sliced(chunks: list[bytes]) -> tuple[list[tuple[bool, int]], bytes]:
    """Return the fields of the heads, and all pieces joined."""
    slicer, heads, pieces = FrameSlicer(), [], b""
    for chunk in chunks:
        slicer.feed(chunk)
        while True:
            if not slicer.is_within:
                head = slicer.head()
                if head is None:
                    break
                heads.append((head.is_control, head.payload_bytes))
                slicer.enter(head)
            piece = slicer.take()
            if not piece:
                break
            pieces += piece
    return heads, pieces


@pytest.mark.parametrize("mask", [False, True], ids=["of a server", "of a client"])
@pytest.mark.parametrize("size", SIZES)
def test_a_head_says_how_long_its_frame_is(size: int, *, mask: bool) -> None:
    frames = Frame(Opcode.TEXT, bytes(size)).serialize(mask=mask) + Frame(Opcode.PING, b"").serialize(
        mask=mask
    )
    assert sliced([frames]) == ([(False, size), (True, 0)], frames)


@pytest.mark.parametrize("opcode", Opcode)
def test_pings_pongs_and_closes_are_control_frames(opcode: Opcode) -> None:
    heads, _ = sliced([Frame(opcode, b"").serialize(mask=False)])
    assert heads == [(opcode in {Opcode.PING, Opcode.PONG, Opcode.CLOSE}, 0)]


def test_a_payload_beyond_all_memory_is_only_announced() -> None:
    slicer = FrameSlicer()
    slicer.feed(bytes([0x81, 0xFF]) + (2**63 - 1).to_bytes(8, "big"))
    head = slicer.head()
    assert head is not None
    assert head.payload_bytes == 2**63 - 1


def test_a_piece_never_reaches_into_the_next_frame() -> None:
    slicer = FrameSlicer()
    first, second = (Frame(Opcode.TEXT, text).serialize(mask=True) for text in (b"first", b"second"))
    slicer.feed(first + second)
    head = slicer.head()
    assert head is not None
    slicer.enter(head)
    assert slicer.take() == first
    assert not slicer.is_within
    assert not slicer.is_empty


@given(
    st.lists(st.tuples(st.sampled_from([Opcode.TEXT, Opcode.CONT]), st.integers(0, 300)), max_size=8),
    st.lists(st.integers(0, 2000), max_size=20),
)
def test_it_does_not_matter_how_the_bytes_come(frames: list[tuple[Opcode, int]], cuts: list[int]) -> None:
    stream = b"".join(Frame(opcode, bytes(size)).serialize(mask=True) for opcode, size in frames)
    ends = [0, *sorted(min(cut, len(stream)) for cut in cuts), len(stream)]
    assert sliced([stream[start:end] for start, end in pairwise(ends)]) == sliced([stream])
    assert len(sliced([stream])[0]) == len(frames)


@pytest.mark.parametrize("size", SIZES)
def test_the_head_of_a_text_is_that_of_the_library(size: int) -> None:
    payload = b"x" * size
    assert text_frame_head(size) + payload == Frame(Opcode.TEXT, payload).serialize(mask=False)


def head_of(frame: bytes) -> FrameHead:
    slicer = FrameSlicer()
    slicer.feed(frame)
    head = slicer.head()
    assert head is not None
    return head


@pytest.mark.parametrize("mask", [True, False])
def test_a_text_is_whole_and_masked_and_has_no_extension(*, mask: bool) -> None:
    firsts = [first for first in range(256) if head_of(bytes([first, mask << 7])).is_text]
    assert firsts == ([0x81] if mask else [])
