"""What connections send at the end of a turn of the event loop: over real sockets, and by a real loop."""

import asyncio
from typing import Any

import pytest

from relay.http.turn_end import LARGE_BYTES, TurnEnd
from tests.fakes.raw_websocket import read_ws_frame, until_closed
from tests.fakes.serving import Server
from tests.relay.http.test_keepalive import Aborted
from tests.relay.http.test_websocket_protocol import WatchedTransport, served

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.integration]


class Connection:
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
        turn_end.add(Connection("second", events))

    asyncio.get_running_loop().call_soon(run)
    await asyncio.sleep(0)
    turn_end.add(Connection("third", events))
    assert events == ["ready"]
    await asyncio.sleep(0)
    assert events == ["ready", "second", "third"]
    await asyncio.sleep(0)
    assert len(events) == 3


async def test_a_bug_of_one_ends_it_alone_and_the_others_send() -> None:
    events, bug, faults = list[str](), KeyError(), list[object]()
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _loop, context: faults.append(context["exception"]))
    try:
        turn_end = TurnEnd(loop)
        faulty, other = Connection("faulty", events, bug), Connection("other", events)
        for connection in (faulty, other):
            turn_end.add(connection)
        await asyncio.sleep(0)
    finally:
        loop.set_exception_handler(None)
    assert (events, faults) == (["other"], [bug])
    assert (faulty.transport.aborts, other.transport.aborts) == (1, 0)


async def test_texts_of_one_turn_are_one_write_and_a_close_follows_them(server: Server) -> None:
    async with served(server, admits=True) as (application, reader, writer):
        application.go_on.set()
        texts, written = await application.texts, list[bytes]()
        assert await read_ws_frame(reader) == b"going on"
        texts.transport = WatchedTransport(texts.transport, written)
        assert texts.send_now("a")
        assert texts.send_now("b")
        assert written == []
        texts.shutdown()
        assert [await read_ws_frame(reader) for _ in range(2)] == [b"a", b"b"]
        assert await until_closed(reader) == 1012
        writer.close()
    assert [data[:2] for data in written] == [b"\x81\x01", b"\x88\x02"]


async def test_a_long_text_is_sent_at_once_behind_what_was_held(server: Server) -> None:
    async with served(server, admits=True) as (application, reader, _writer):
        application.go_on.set()
        texts, long = await application.texts, "x" * LARGE_BYTES
        assert await read_ws_frame(reader) == b"going on"
        written: list[bytes] = []
        texts.transport = WatchedTransport(texts.transport, written)
        assert texts.send_now("a")
        assert texts.send_now(long)
        assert len(written) == 1
        assert [await read_ws_frame(reader) for _ in range(2)] == [b"a", long.encode()]


async def test_what_is_held_for_a_lost_connection_is_not_written(server: Server) -> None:
    async with served(server, admits=True) as (application, reader, _writer):
        application.go_on.set()
        texts = await application.texts
        assert await read_ws_frame(reader) == b"going on"
        written: list[bytes] = []
        texts.transport = WatchedTransport(texts.transport, written)
        assert texts.send_now("a")
        texts.transport.abort()
        assert await application.ended
    assert written == []
