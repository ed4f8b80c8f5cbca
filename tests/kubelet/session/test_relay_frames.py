import asyncio
from collections.abc import AsyncIterator, Mapping
from typing import Any

import pytest

from kubelet.session.channel import Channel
from kubelet.session.relay_frames import MAX_QUEUED_BYTES, LinkEvent, RelayFrames
from schemas.frames import Frame, OneWayType
from schemas.process.logs import make_logger
from schemas.session import DropReason, OverRateError, ProtocolError
from tests.fakes.frames import PAYLOADS, message_id
from tests.fakes.lines import LogLines

SAMPLE = PAYLOADS["telemetry"]
LEASE = Frame("telemetry_lease", message_id(1), PAYLOADS["telemetry_lease"])


class Held:
    """A channel whose socket takes texts when the test lets it; ``encoded`` fails by what the test sets."""

    def __init__(self) -> None:
        self.is_open = True
        self.error: Exception | None = None
        self.sent: list[str] = []
        self.takes = asyncio.Event()
        self.taken: asyncio.Queue[str] = asyncio.Queue()

    def encoded(self, type_: str, payload: Mapping[str, Any]) -> str:
        if self.error is not None:
            raise self.error
        return f"{type_} {payload}"

    async def send_text(self, text: str) -> bool:
        await self.takes.wait()
        self.sent.append(text)
        self.taken.put_nowait(text)
        return True


def channel_of(held: Any) -> Channel:
    channel: Channel = held
    return channel


@pytest.fixture
def frames(log: LogLines) -> RelayFrames:
    return RelayFrames(make_logger("kubelet", log))


@pytest.fixture
async def held(frames: RelayFrames) -> AsyncIterator[Held]:
    held = Held()
    frames.attach(channel_of(held), resumed=False)
    yield held
    frames.detach()


async def drained(held: Held, count: int) -> None:
    held.takes.set()
    async with asyncio.timeout(30):
        for _ in range(count):
            await held.taken.get()


async def test_frames_are_sent_in_order_by_the_connection_that_there_is(
    frames: RelayFrames, held: Held
) -> None:
    assert all(frames.send(OneWayType.TELEMETRY, {"n": n}) for n in range(3))
    await drained(held, 3)
    assert held.sent == [f"telemetry {{'n': {n}}}" for n in range(3)]


async def test_without_a_connection_nothing_is_sent_or_kept(frames: RelayFrames, held: Held) -> None:
    frames.send(OneWayType.TELEMETRY, SAMPLE)
    frames.detach()
    assert not frames.send(OneWayType.TELEMETRY, SAMPLE)
    newer = Held()
    frames.attach(channel_of(newer), resumed=True)
    frames.send(OneWayType.TELEMETRY, {"n": 1})
    held.takes.set()
    await drained(newer, 1)
    assert (held.sent, newer.sent) == ([], ["telemetry {'n': 1}"])


async def test_what_waits_for_a_relay_that_does_not_read_is_bounded(frames: RelayFrames, held: Held) -> None:
    large = {"n": "x" * 60_000}
    sent = sum(frames.send(OneWayType.TELEMETRY, large) for _ in range(100))
    assert sent == -(-MAX_QUEUED_BYTES // len(held.encoded("telemetry", large)))
    assert frames.refused == 100 - sent


async def test_a_frame_over_its_rate_is_not_sent(frames: RelayFrames, held: Held) -> None:
    held.error = OverRateError(1.0)
    assert not frames.send(OneWayType.TELEMETRY, SAMPLE)
    assert frames.refused == 1


async def test_a_frame_that_does_not_fit_its_type_is_a_fault_of_ours(
    frames: RelayFrames, held: Held, log: LogLines
) -> None:
    held.error = ProtocolError("a frame over the limit")
    assert not frames.send(OneWayType.TELEMETRY, SAMPLE)
    assert log.entries("frame does not fit its type")


async def test_a_frame_goes_to_the_one_handler_of_its_type(frames: RelayFrames, log: LogLines) -> None:
    frames.received(LEASE)  # no handler: not an error
    received: list[Mapping[str, Any]] = []
    frames.on_frame(OneWayType.TELEMETRY_LEASE, received.append)
    with pytest.raises(ValueError, match="has a handler"):
        frames.on_frame(OneWayType.TELEMETRY_LEASE, received.append)
    frames.received(LEASE)
    assert received == [LEASE.payload]
    assert log.entries("frame not handled") == []


async def test_a_handler_with_a_bug_is_logged_and_ends_nothing(frames: RelayFrames, log: LogLines) -> None:
    def fails(_: object) -> None:
        raise ZeroDivisionError

    def fails_too(_: object) -> None:
        raise KeyError

    frames.on_frame(OneWayType.TELEMETRY_LEASE, fails)
    frames.on_link(fails_too)
    frames.attach(channel_of(Held()), resumed=False)
    frames.received(LEASE)
    assert log.entries("frame not handled")
    assert log.entries("connection not followed")


async def test_followers_learn_of_connect_resume_and_loss(frames: RelayFrames) -> None:
    events: list[LinkEvent] = []
    frames.on_link(events.append)
    for resumed in (False, True):
        frames.attach(channel_of(Held()), resumed=resumed)
        frames.detach()
        frames.detach()
    assert events == [LinkEvent.CONNECTED, LinkEvent.LOST, LinkEvent.RESUMED, LinkEvent.LOST]


def test_dropped_frames_are_counted_and_the_first_of_each_reason_is_logged(
    frames: RelayFrames, log: LogLines
) -> None:
    for _ in range(2):
        frames.count_dropped({DropReason.OVER_RATE: 2})
    assert frames.dropped == {DropReason.OVER_RATE: 4}
    assert len(log.entries("a frame of the relay is dropped")) == 1
