"""A connection's budget of frames and its masks, without a connection."""

import math

import pytest
from websockets.frames import Frame, Opcode

from relay.http.websocket_protocol import (
    CREDIT_OF_A_COMMAND,
    FRAMES_AT_ONCE,
    FRAMES_BEFORE_ADMISSION,
    FRAMES_PER_S,
    FrameMeter,
    unmasked,
)
from schemas.frames import MAX_FRAME_BYTES
from schemas.websocket_frames import FrameHead, FrameSlicer
from tests.fakes.seconds import Seconds

MESSAGE = FrameHead(is_control=False, is_text=True, payload_bytes=0, head_bytes=6)
PING = FrameHead(is_control=True, is_text=False, payload_bytes=0, head_bytes=6)
COMMANDS = 3


def taken(meter: FrameMeter, head: FrameHead) -> tuple[int, float]:
    """Return how many pass, and what is said to the first that does not."""
    count = 0
    while (wait_s := meter.take(head)) == 0:
        count += 1
    return count, wait_s


@pytest.fixture
def seconds() -> Seconds:
    return Seconds()


@pytest.fixture
def admitted(seconds: Seconds) -> FrameMeter:
    meter = FrameMeter(seconds)
    meter.admit()
    return meter


@pytest.mark.parametrize("head", [MESSAGE, PING])
def test_a_stranger_has_a_handful_and_no_more_however_long_it_waits(
    seconds: Seconds, head: FrameHead
) -> None:
    meter = FrameMeter(seconds)
    assert not meter.is_admitted
    assert taken(meter, head) == (FRAMES_BEFORE_ADMISSION, math.inf)
    seconds.now += 3600
    assert meter.take(head) == math.inf


def test_a_stranger_does_not_send_long_frames() -> None:
    assert (
        FrameMeter(Seconds()).take(
            FrameHead(is_control=False, is_text=True, payload_bytes=1 << 20, head_bytes=14)
        )
        == math.inf
    )


def test_what_is_too_much_of_a_node_waits_or_is_cut_off(admitted: FrameMeter, seconds: Seconds) -> None:
    assert taken(admitted, MESSAGE) == (FRAMES_AT_ONCE, 1 / FRAMES_PER_S)
    assert admitted.take(PING) == math.inf
    seconds.now += 1 / FRAMES_PER_S
    assert admitted.take(MESSAGE) == 0


def test_each_4_kib_cost_as_much_as_a_frame(admitted: FrameMeter) -> None:
    count, _ = taken(admitted, FrameHead(is_control=False, is_text=True, payload_bytes=4096, head_bytes=8))
    assert count == FRAMES_AT_ONCE / 2


@pytest.mark.parametrize("size", [MAX_FRAME_BYTES, 2**63 - 1])
def test_the_longest_frame_passes_and_a_longer_one_is_the_parsers_to_refuse(
    admitted: FrameMeter, size: int
) -> None:
    assert admitted.take(FrameHead(is_control=False, is_text=True, payload_bytes=size, head_bytes=14)) == 0


def test_each_command_pays_for_its_answer_and_for_no_ping(admitted: FrameMeter) -> None:
    for _ in range(COMMANDS):
        admitted.expect_answer()
    assert taken(admitted, PING) == (FRAMES_AT_ONCE, math.inf)
    count, wait_s = taken(admitted, MESSAGE)
    assert count >= COMMANDS
    assert 0 < wait_s < math.inf


def test_a_node_that_is_called_again_and_again_may_answer_with_the_largest_frame(
    admitted: FrameMeter, seconds: Seconds
) -> None:
    largest = FrameHead(is_control=False, is_text=True, payload_bytes=MAX_FRAME_BYTES, head_bytes=14)
    for _ in range(600):
        seconds.now += 1
        admitted.expect_answer()
        assert admitted.take(largest) == 0


def test_the_size_of_answers_pays_for_no_small_frames(admitted: FrameMeter) -> None:
    for _ in range(COMMANDS):
        admitted.expect_answer()
    empty = FrameHead(is_control=False, is_text=True, payload_bytes=0, head_bytes=6)
    assert taken(admitted, empty)[0] == FRAMES_AT_ONCE + COMMANDS * CREDIT_OF_A_COMMAND


def test_commands_without_end_do_not_pay_for_answers_without_end(admitted: FrameMeter) -> None:
    for _ in range(10_000):
        admitted.expect_answer()
    assert taken(admitted, MESSAGE)[0] <= FRAMES_AT_ONCE + 1024


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
