"""Texts that wait for those of other connections: by a clock of its own, and over real sockets."""

import asyncio
from typing import Any

import pytest

from relay.http.deferral import DEFERRED_S, Deferral
from tests.fakes.polling import until
from tests.fakes.raw_http import exchange
from tests.fakes.raw_websocket import read_ws_frame, ws_frame
from tests.fakes.serving import Server
from tests.relay.http.test_keepalive import Aborted, PlayedLoop
from tests.relay.http.test_websocket_protocol import REQUEST, Application, served

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


def test_a_bug_of_one_ends_it_alone_and_the_others_are_resumed() -> None:
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


async def offered(application: Application, texts: list[str]) -> None:
    """Have the texts that begin with w wait, and all of them put into ``texts`` when they are handled."""
    application.go_on.set()
    (await application.texts).handle_texts(texts.append, lambda beginning: beginning.startswith(b"w"))


@pytest.mark.integration
@pytest.mark.asyncio(loop_scope="module")
async def test_a_text_that_may_wait_is_handled_with_those_of_others() -> None:
    async with (
        Server.running() as server,
        served(server, admits=True) as (one, one_reads, one_writes),
    ):
        texts: list[str] = []
        await offered(one, texts)
        assert await read_ws_frame(one_reads) == b"going on"
        one_writes.write(ws_frame(b"wait 1") + ws_frame(b"heartbeat 1"))
        await until(lambda: texts == ["wait 1", "heartbeat 1"])


@pytest.mark.integration
@pytest.mark.asyncio(loop_scope="module")
async def test_what_arrives_behind_a_text_that_waits_ends_the_wait() -> None:
    async with (
        Server.running(deferred_s=LATER_S) as server,
        served(server, admits=True) as (application, reader, writer),
    ):
        texts: list[str] = []
        await offered(application, texts)
        assert await read_ws_frame(reader) == b"going on"
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
            texts: list[str] = []
            await offered(other, texts)
            assert await read_ws_frame(other_reads) == b"going on"
            application.go_on.set()
            (await application.texts).handle_texts(raising, lambda _: True)
            assert await read_ws_frame(reader) == b"going on"
            writer.write(ws_frame(b"wait"))
            other_writes.write(ws_frame(b"wait"))
            async with asyncio.timeout(10):
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
        texts: list[str] = []
        await offered(application, texts)
        assert await read_ws_frame(reader) == b"going on"
        writer.write(ws_frame(b"wait"))
        await until(lambda: of_server[0].waiting)
        writer.close()
        async with asyncio.timeout(10):
            await application.ended
        assert not of_server[0].waiting
        assert texts == []
