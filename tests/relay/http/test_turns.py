"""What serves many connections in one callback: by a clock of its own, a real loop, and over real sockets."""

import asyncio
from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any

import pytest

from relay.http.turns import DEFERRED_S, LARGE_BYTES, Deferral, Keepalive, TurnEnd
from tests.fakes.polling import until
from tests.fakes.raw_http import exchange, read_ws_frame, until_closed, ws_frame
from tests.fakes.serving import Server
from tests.relay.http.test_websocket_protocol import REQUEST, Application, gone_on, served, watched

BOUND_S = 30
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


LATER_S = 3600.0
"""So late that a test which waits for it fails by its own bound."""


class Connection:
    def __init__(self, loop: PlayedLoop, bug: Exception | None = None) -> None:
        self._loop = loop
        self._bug = bug
        self.transport: Any = Aborted()
        self.resumed: list[float] = []

    def resume(self) -> None:
        if self._bug is not None:
            raise self._bug
        self.resumed.append(self._loop.now)


def made(loop: PlayedLoop) -> Deferral:
    played: Any = loop
    return Deferral(played)


def test_all_are_resumed_when_the_first_has_waited_long_enough() -> None:
    loop = PlayedLoop()
    deferral, first, second = made(loop), Connection(loop), Connection(loop)
    deferral.add(first)
    loop.advance(DEFERRED_S * 0.9)
    deferral.add(second)
    assert (first.resumed, second.resumed) == ([], [])
    loop.advance(DEFERRED_S)
    assert (first.resumed, second.resumed) == ([DEFERRED_S], [DEFERRED_S])
    assert loop.pending == 0


def test_one_that_is_removed_is_not_resumed_and_one_that_waits_again_is_resumed_again() -> None:
    loop = PlayedLoop()
    deferral, removed, again = made(loop), Connection(loop), Connection(loop)
    deferral.add(removed)
    deferral.add(again)
    deferral.remove(removed)
    loop.advance(DEFERRED_S)
    deferral.add(again)
    loop.advance(DEFERRED_S)
    assert (removed.resumed, len(again.resumed)) == ([], 2)


def test_the_event_loop_has_turns_of_its_own_between_many() -> None:
    loop = PlayedLoop()
    deferral, connections = made(loop), [Connection(loop) for _ in range(50)]
    for connection in connections:
        deferral.add(connection)
    loop.advance(DEFERRED_S)
    assert all(len(connection.resumed) == 1 for connection in connections)
    assert loop.fired >= 5


def test_a_bug_of_one_that_is_resumed_ends_it_alone() -> None:
    loop, bug = PlayedLoop(), KeyError()
    faulty, others = Connection(loop, bug), [Connection(loop) for _ in range(20)]
    deferral = made(loop)
    for connection in (others[0], faulty, *others[1:]):
        deferral.add(connection)
    loop.advance(DEFERRED_S)
    assert all(len(other.resumed) == 1 and not other.transport.aborts for other in others)
    assert (faulty.transport.aborts, loop.faults) == (1, [bug])
    deferral.add(others[0])
    loop.advance(DEFERRED_S)
    assert len(others[0].resumed) == 2


async def offered(application: Application, reader: asyncio.StreamReader) -> list[str]:
    """Have the texts that begin with w wait; return the list to which each is added when it is handled."""
    texts: list[str] = []
    socket = await gone_on(application, reader)
    socket.handle_texts(texts.append, lambda beginning: beginning.startswith(b"w"))
    return texts


@pytest.mark.integration
@pytest.mark.asyncio(loop_scope="module")
async def test_a_text_that_may_wait_is_handled_with_those_of_others() -> None:
    async with (
        Server.running() as server,
        served(server, admits=True) as (one, one_reads, one_writes),
    ):
        texts = await offered(one, one_reads)
        one_writes.write(ws_frame(b"wait 1") + ws_frame(b"heartbeat 1"))
        await until(lambda: texts == ["wait 1", "heartbeat 1"])


@pytest.mark.integration
@pytest.mark.asyncio(loop_scope="module")
async def test_what_arrives_behind_a_text_that_waits_ends_the_wait() -> None:
    async with (
        Server.running(deferred_s=LATER_S) as server,
        served(server, admits=True) as (application, reader, writer),
    ):
        texts = await offered(application, reader)
        writer.write(ws_frame(b"wait"))
        # What came on another connection after it is answered, so the text has been received.
        assert b"200 OK" in await exchange(server.address.port, REQUEST)
        assert texts == []
        writer.write(ws_frame(b"answer"))
        await until(lambda: texts == ["wait", "answer"])
        writer.write(ws_frame(b"urgent") + ws_frame(b"wait"))
        await until(lambda: texts == ["wait", "answer", "urgent", "wait"])


@pytest.mark.integration
@pytest.mark.asyncio(loop_scope="module")
async def test_a_text_that_raises_closes_its_connection_and_is_reported() -> None:
    loop, faults = asyncio.get_running_loop(), list[object]()
    loop.set_exception_handler(lambda _loop, context: faults.append(context["exception"]))
    bug = KeyError()

    def raising(_text: str) -> None:
        raise bug

    try:
        async with (
            Server.running() as server,
            served(server, admits=True) as (other, other_reads, other_writes),
            served(server, admits=True) as (application, reader, writer),
        ):
            texts = await offered(other, other_reads)
            (await gone_on(application, reader)).handle_texts(raising, lambda _: True)
            writer.write(ws_frame(b"wait"))
            other_writes.write(ws_frame(b"wait"))
            async with asyncio.timeout(30):
                await application.ended
            await until(lambda: texts == ["wait"])
            assert not other.ended.done()
    finally:
        loop.set_exception_handler(None)
    assert faults == [bug]


@pytest.mark.integration
@pytest.mark.asyncio(loop_scope="module")
async def test_of_a_connection_that_is_lost_nothing_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    of_server: list[Deferral] = []

    def recorded(loop: asyncio.AbstractEventLoop, wait_s: float) -> Deferral:
        of_server.append(Deferral(loop, wait_s))
        return of_server[0]

    monkeypatch.setattr("relay.http.listener.Deferral", recorded)
    async with (
        Server.running(deferred_s=LATER_S) as server,
        served(server, admits=True) as (application, reader, writer),
    ):
        texts = await offered(application, reader)
        writer.write(ws_frame(b"wait"))
        await until(lambda: of_server[0].waiting)
        writer.close()
        async with asyncio.timeout(30):
            await application.ended
        assert not of_server[0].waiting
        assert texts == []


class Holder:
    def __init__(self, name: str, events: list[str], bug: Exception | None = None) -> None:
        self._name = name
        self._events = events
        self._bug = bug
        self.transport: Any = Aborted()

    def send_held(self) -> None:
        if self._bug is not None:
            raise self._bug
        self._events.append(self._name)


async def test_all_send_once_what_is_ready_to_run_has_run_and_in_their_order() -> None:
    events: list[str] = []
    turn_end = TurnEnd(asyncio.get_running_loop())

    def run() -> None:
        events.append("ready")
        turn_end.add(Holder("second", events))

    asyncio.get_running_loop().call_soon(run)
    await asyncio.sleep(0)
    turn_end.add(Holder("third", events))
    assert events == ["ready"]
    await asyncio.sleep(0)
    assert events == ["ready", "second", "third"]
    await asyncio.sleep(0)
    assert len(events) == 3


async def test_what_is_whole_is_sent_at_once_while_turns_have_no_more_than_one() -> None:
    events: list[str] = []
    turn_end = TurnEnd(asyncio.get_running_loop())
    for turn in ("a", "b"):
        turn_end.add(Holder(turn, events), is_whole=True)
        assert events[-1] == turn
        await asyncio.sleep(0)
    events.clear()
    for name in ("first", "second"):
        turn_end.add(Holder(name, events), is_whole=True)
    assert events == ["first"]
    await asyncio.sleep(0)
    turn_end.add(Holder("after others", events), is_whole=True)
    assert "after others" not in events
    await asyncio.sleep(0)
    turn_end.add(Holder("alone again", events), is_whole=True)
    assert events[-2:] == ["after others", "alone again"]


async def test_a_bug_of_one_that_sends_ends_it_alone() -> None:
    events, bug, faults = list[str](), KeyError(), list[object]()
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _loop, context: faults.append(context["exception"]))
    try:
        turn_end = TurnEnd(loop)
        faulty, other = Holder("faulty", events, bug), Holder("other", events)
        for connection in (faulty, other):
            turn_end.add(connection)
        await asyncio.sleep(0)
    finally:
        loop.set_exception_handler(None)
    assert (events, faults) == (["other"], [bug])
    assert (faulty.transport.aborts, other.transport.aborts) == (1, 0)


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.integration
async def test_texts_of_one_turn_are_one_write_and_a_close_follows_them(server: Server) -> None:
    async with served(server, admits=True) as (application, reader, writer):
        texts = await gone_on(application, reader)
        written = watched(texts)
        assert texts.send_now("a")
        assert texts.send_now("b")
        assert written == []
        texts.shutdown()
        assert [await read_ws_frame(reader) for _ in range(2)] == [b"a", b"b"]
        assert await until_closed(reader) == 1012
        writer.close()
    assert [data[:2] for data in written] == [b"\x81\x01", b"\x88\x02"]


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.integration
async def test_a_long_text_is_sent_at_once_behind_what_was_held(server: Server) -> None:
    async with served(server, admits=True) as (application, reader, _writer):
        texts, long = await gone_on(application, reader), "x" * LARGE_BYTES
        written = watched(texts)
        assert texts.send_now("a")
        assert texts.send_now(long)
        assert len(written) == 1
        assert [await read_ws_frame(reader) for _ in range(2)] == [b"a", long.encode()]


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.integration
async def test_what_is_held_for_a_lost_connection_is_not_written(server: Server) -> None:
    async with served(server, admits=True) as (application, reader, _writer):
        texts = await gone_on(application, reader)
        written = watched(texts)
        assert texts.send_now("a")
        texts.transport.abort()
        assert await application.ended
    assert written == []
