"""The queue of pings by a clock of its own, and over real sockets."""

import asyncio
from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any

import pytest

from relay.http.keepalive import Keepalive
from tests.fakes.raw_websocket import read_ws_frame, ws_frame
from tests.fakes.serving import Server
from tests.relay.http.test_websocket_protocol import served

BOUND_S = 10
# A turn is a sixty-fourth of the interval: a quarter of a second.
INTERVAL_S, TIMEOUT_S = 16.0, 10.0


class PlayedLoop:
    """Timers by a clock that the test moves.

    Attributes:
        faults: what was reported as asyncio reports the errors of protocols.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self.fired = 0
        self.faults: list[object] = []
        self._timers: list[tuple[float, int, Callable[[], None]]] = []

    def time(self) -> float:
        return self.now

    def call_later(self, delay: float, callback: Callable[[], None]) -> object:
        heappush(self._timers, (self.now + delay, id(callback), callback))
        return object()

    def call_exception_handler(self, context: dict[str, object]) -> None:
        self.faults.append(context["exception"])

    @property
    def pending(self) -> int:
        return len(self._timers)

    def advance(self, seconds: float) -> None:
        end = self.now + seconds
        while self._timers and self._timers[0][0] <= end:
            self.now, _, callback = heappop(self._timers)
            self.fired += 1
            callback()
        self.now = end


class Aborted:
    """A transport that can only be aborted."""

    def __init__(self) -> None:
        self.aborts = 0

    def abort(self) -> None:
        self.aborts += 1


class Peer:
    """A connection whose other end answers at once, or never."""

    def __init__(
        self, keepalive: Keepalive, loop: PlayedLoop, *, answers: bool = True, closing: bool = False
    ) -> None:
        self._keepalive, self._loop = keepalive, loop
        self._answers, self._closing = answers, closing
        self.transport: Any = Aborted()
        self.bugs: dict[str, Exception] = {}
        self.pings: list[float] = []
        self.ended: list[float] = []

    def ping(self) -> bool:
        if "ping" in self.bugs:
            raise self.bugs["ping"]
        if self._closing:
            return False
        self.pings.append(self._loop.now)
        return True

    def keepalive_timeout(self) -> None:
        if "timeout" in self.bugs:
            raise self.bugs["timeout"]
        self.ended.append(self._loop.now)

    def answer(self) -> bool:
        return self._answers and self._keepalive.answered(self)


@pytest.fixture
def loop() -> PlayedLoop:
    return PlayedLoop()


@pytest.fixture
def keepalive(loop: PlayedLoop) -> Keepalive:
    played: Any = loop
    return Keepalive(played, INTERVAL_S, TIMEOUT_S)


def test_each_is_pinged_an_interval_after_its_last_answer(loop: PlayedLoop, keepalive: Keepalive) -> None:
    peer = Peer(keepalive, loop)
    keepalive.watch(peer)
    loop.advance(20)
    assert peer.pings == [16]
    assert peer.answer()
    loop.advance(15.5)
    assert peer.pings == [16]
    loop.advance(1)
    assert peer.pings == [16, 36]


def test_one_that_does_not_answer_is_ended_once(loop: PlayedLoop, keepalive: Keepalive) -> None:
    silent, other = Peer(keepalive, loop, answers=False), Peer(keepalive, loop)
    keepalive.watch(silent)
    keepalive.watch(other)
    loop.advance(16)
    assert other.answer()
    loop.advance(100)
    assert not silent.answer()
    assert (silent.pings, silent.ended) == ([16], [26])
    assert (other.pings, other.ended) == ([16, 32], [42])


def test_an_answer_that_nothing_waits_for_has_no_effect(loop: PlayedLoop, keepalive: Keepalive) -> None:
    peer = Peer(keepalive, loop)
    keepalive.watch(peer)
    loop.advance(15)
    assert not peer.answer()
    loop.advance(1)
    assert peer.pings == [16]
    assert (peer.answer(), peer.answer()) == (True, False)


def test_one_that_is_forgotten_or_closing_is_left_alone(loop: PlayedLoop, keepalive: Keepalive) -> None:
    before, after, closing = Peer(keepalive, loop), Peer(keepalive, loop), Peer(keepalive, loop, closing=True)
    for peer in (before, after, closing):
        keepalive.watch(peer)
    keepalive.forget(before)
    loop.advance(16)
    keepalive.forget(after)
    loop.advance(100)
    assert [peer.pings for peer in (before, after, closing)] == [[], [16], []]
    assert [peer.ended for peer in (before, after, closing)] == [[], [], []]
    assert loop.pending == 0


@pytest.mark.parametrize("where", ["ping", "timeout"])
def test_a_bug_of_one_ends_it_alone_and_the_others_are_pinged_on(
    where: str, loop: PlayedLoop, keepalive: Keepalive
) -> None:
    faulty, other = Peer(keepalive, loop, answers=False), Peer(keepalive, loop)
    faulty.bugs[where] = KeyError(where)
    keepalive.watch(faulty)
    keepalive.watch(other)
    loop.advance(16)
    assert other.answer()
    loop.advance(16)
    assert (other.pings, other.transport.aborts) == ([16, 32], 0)
    assert (faulty.transport.aborts, loop.faults) == (1, [faulty.bugs[where]])


def test_the_number_of_timers_does_not_follow_the_number_of_connections(
    loop: PlayedLoop, keepalive: Keepalive
) -> None:
    peers = [Peer(keepalive, loop) for _ in range(2_000)]
    for peer in peers:
        keepalive.watch(peer)
        loop.advance(0.001)
    assert loop.pending == 1
    for _ in range(600):
        loop.advance(0.1)
        for peer in peers:
            peer.answer()
    assert {len(peer.pings) for peer in peers} == {3}
    assert loop.fired <= 62 * 4 + 1


def test_a_single_connection_takes_one_turn_for_each_step(loop: PlayedLoop, keepalive: Keepalive) -> None:
    peer = Peer(keepalive, loop)
    keepalive.watch(peer)
    for _ in range(10):
        loop.advance(16)
        assert peer.answer()
    assert (len(peer.pings), loop.fired <= 20) == (10, True)


async def until_going_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answer the pings that are sent before the application goes on."""
    while (said := await read_ws_frame(reader)) != b"going on":
        assert said == b""
        writer.write(ws_frame(b"", opcode=10))


@pytest.mark.integration
@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(
    "pong",
    [
        pytest.param(ws_frame(b"", opcode=10), id="alone"),
        pytest.param(ws_frame(b"hi") + ws_frame(b"", opcode=10), id="behind a message"),
        pytest.param(ws_frame(b"with a payload", opcode=10), id="with a payload"),
    ],
)
async def test_a_peer_that_answers_is_pinged_again_however_it_spells_that(
    pong: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("relay.http.listener._PING_INTERVAL_S", 0.02)
    async with Server.running() as server, served(server, admits=True) as (application, reader, writer):
        application.go_on.set()
        await until_going_on(reader, writer)
        for _ in range(5):
            assert await read_ws_frame(reader) == b""
            writer.write(pong)


@pytest.mark.integration
@pytest.mark.asyncio(loop_scope="module")
async def test_a_pong_in_two_pieces_is_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("relay.http.listener._PING_INTERVAL_S", 0.02)
    async with Server.running() as server, served(server, admits=True) as (application, reader, writer):
        application.go_on.set()
        await until_going_on(reader, writer)
        for _ in range(3):
            assert await read_ws_frame(reader) == b""
            for piece in (ws_frame(b"", opcode=10)[:3], ws_frame(b"", opcode=10)[3:]):
                writer.write(piece)
                await writer.drain()
                await asyncio.sleep(0)
