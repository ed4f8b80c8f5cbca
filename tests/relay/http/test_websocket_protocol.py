"""What a WebSocket may make the relay do and hold: over real sockets, with the product's own server."""

import asyncio
import gc
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest
from starlette.types import Receive, Scope, Send
from websockets.server import ServerProtocol

from relay.http.websocket_protocol import (
    FLOODED,
    FRAMES_AT_ONCE,
    FRAMES_BEFORE_ADMISSION,
    MAX_BYTES_BEFORE_ADMISSION,
    BoundedWebSocket,
    SocketClosedError,
)
from tests.fakes.polling import until
from tests.fakes.raw_connection import connected
from tests.fakes.raw_http import UPGRADE, exchange, read_ws_frame, until_closed, until_cut, ws_frame
from tests.fakes.serving import Server

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.integration]

BOUND_S = 30
REQUEST = b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
EMPTY = ws_frame(b"")
PING = ws_frame(b"", opcode=9)
CLOSE = ws_frame((1000).to_bytes(2, "big"), opcode=8)


class Application:
    """Accepts a WebSocket, and asks for its messages once it may."""

    def __init__(self, *, admits: bool) -> None:
        self._admits = admits
        self.handler: Callable[[str], object] | None = None
        self.texts: asyncio.Future[BoundedWebSocket] = asyncio.get_running_loop().create_future()
        self.accepted = asyncio.Event()
        self.go_on = asyncio.Event()
        self.received: asyncio.Queue[object] = asyncio.Queue()
        self.ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    async def __call__(self, socket: BoundedWebSocket) -> None:
        socket.accept("")
        if self._admits:
            assert socket.admit("node")
            socket.meter.admit()
        await self.go_on.wait()
        self.texts.set_result(socket)
        if self.handler is not None:
            socket.handle_texts(self.handler)
        await socket.send("going on")
        try:
            while True:
                message = await socket.receive()
                if message == "close":
                    await socket.close(1000)
                self.received.put_nowait(message)
        except SocketClosedError as error:
            self.ended.set_result(error.code)


async def answer(scope: Scope, _receive: Receive, send: Send) -> None:
    assert scope["type"] == "http"
    await send({"type": "http.response.start", "status": 200, "headers": [(b"connection", b"close")]})
    await send({"type": "http.response.body", "body": b"ok"})


class WatchedTransport:
    """A transport whose writes are recorded in ``written``."""

    def __init__(self, transport: asyncio.Transport, written: list[bytes]) -> None:
        self._transport = transport
        self._written = written

    def write(self, data: bytes) -> None:
        self._written.append(data)
        self._transport.write(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


def watched(socket: BoundedWebSocket) -> list[bytes]:
    """Return the list to which what ``socket`` writes is added."""
    written: list[bytes] = []
    transport: Any = WatchedTransport(socket.transport, written)
    socket.transport = transport
    return written


async def gone_on(application: Application, reader: asyncio.StreamReader) -> BoundedWebSocket:
    """Let ``application`` go on, and return its socket once its peer has been told."""
    application.go_on.set()
    assert await read_ws_frame(reader) == b"going on"
    return await application.texts


@asynccontextmanager
async def served(
    server: Server, *, admits: bool
) -> AsyncIterator[tuple[Application, asyncio.StreamReader, asyncio.StreamWriter]]:
    """Hold a connection whose upgrade was accepted."""
    server.app, server.serve_socket = answer, (application := Application(admits=admits))
    reader, writer = await connected(server)
    writer.write(UPGRADE)
    try:
        async with asyncio.timeout(BOUND_S):
            await reader.readuntil(b"\r\n\r\n")
            yield application, reader, writer
    finally:
        writer.close()


async def test_nothing_is_parsed_before_the_application_asks_for_a_message(server: Server) -> None:
    async with served(server, admits=True) as (application, reader, writer):
        writer.write(PING)
        # What came on another connection after it is answered, so the ping has been received.
        assert b"200 OK" in await exchange(server.address.port, REQUEST)
        await gone_on(application, reader)
        assert await read_ws_frame(reader) == b""  # the pong


async def test_the_frames_of_one_packet_are_handed_over_one_by_one(server: Server) -> None:
    async with served(server, admits=True) as (application, reader, writer):
        application.go_on.set()
        writer.write(
            ws_frame(b"a") + PING + ws_frame(b"b", fin=False) + ws_frame(b"c", opcode=0) + ws_frame(b"d")
        )
        assert [await application.received.get() for _ in range(3)] == ["a", "bc", "d"]
        assert [await read_ws_frame(reader) for _ in range(2)] == [b"going on", b""]


@pytest.mark.parametrize("size", [0, 1, 125, 126, 65_535, 65_536])
async def test_a_frame_that_comes_byte_by_byte_is_whole(server: Server, size: int) -> None:
    async with served(server, admits=True) as (application, _reader, writer):
        application.go_on.set()
        frame = ws_frame(b"x" * size)
        for index in range(16):
            writer.write(frame[index : index + 1])
            await writer.drain()
        writer.write(frame[16:] + ws_frame(b"next"))
        assert await application.received.get() == "x" * size
        assert await application.received.get() == "next"


async def test_a_stranger_may_send_a_handful(server: Server) -> None:
    async with served(server, admits=False) as (application, reader, writer):
        application.go_on.set()
        handful = int(FRAMES_BEFORE_ADMISSION)
        writer.write(EMPTY * handful)
        assert [await application.received.get() for _ in range(handful)] == [""] * handful
        writer.write(EMPTY)
        assert await application.ended == FLOODED
        assert await until_cut(reader, writer) is None


async def test_a_stranger_may_not_send_much_at_once(server: Server) -> None:
    async with served(server, admits=False) as (_application, reader, writer):
        # Never parsed: the application does not ask for it.
        writer.write(bytes(MAX_BYTES_BEFORE_ADMISSION + 1))
        assert await until_closed(reader) is None


async def test_a_node_may_send_more_than_a_stranger(server: Server) -> None:
    async with served(server, admits=True) as (application, _reader, writer):
        application.go_on.set()
        count = int(FRAMES_AT_ONCE)
        writer.write(EMPTY * count)
        assert [await application.received.get() for _ in range(count)] == [""] * count
        assert not application.ended.done()


async def test_messages_over_the_rate_wait_for_their_turn(server: Server) -> None:
    async with served(server, admits=True) as (application, _reader, writer):
        application.go_on.set()
        count = int(FRAMES_AT_ONCE) + 4
        writer.write(EMPTY * count)
        assert [await application.received.get() for _ in range(count)] == [""] * count
        assert not application.ended.done()


async def test_a_node_that_stays_behind_its_rate_is_cut_off(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("relay.http.websocket_protocol.MAX_BEHIND_S", 0.1)
    async with served(server, admits=True) as (application, reader, writer):
        application.go_on.set()
        writer.write(EMPTY * 200)
        assert await application.ended == FLOODED
        assert application.received.qsize() < 200
        await until_cut(reader, writer)


async def test_a_close_that_came_with_a_message_ends_the_connection_at_once(server: Server) -> None:
    async with served(server, admits=True) as (application, reader, writer):
        application.go_on.set()
        writer.write(ws_frame(b"close") + CLOSE)
        assert await read_ws_frame(reader) == b"going on"
        assert await until_cut(reader, writer) == 1000


async def test_the_time_of_a_stranger_runs_on_through_the_upgrade_and_that_of_a_node_does_not() -> None:
    async with Server.running(request_timeout_s=0.3) as server, served(server, admits=True) as connection:
        node, _, writer = connection
        node.go_on.set()
        async with served(server, admits=False) as (stranger, reader, _):
            stranger.go_on.set()
            with suppress(ConnectionError):
                await reader.read()
            await stranger.ended
        await until(lambda: len(server.connections) == 1)
        writer.write(EMPTY)
        assert await node.received.get() == ""


# --- texts as they arrive ----------------------------------------------------------------------------------


async def test_texts_are_offered_as_they_arrive_and_received_where_that_is_not_enough(server: Server) -> None:
    async with served(server, admits=True) as (application, _reader, writer):
        offered: list[str] = []

        def handler(text: str) -> str | None:
            offered.append(text)
            return f"read: {text}" if text.startswith("b") else None

        application.handler = handler
        application.go_on.set()
        writer.write(b"".join(ws_frame(text) for text in (b"a1", b"b1", b"a2", b"b2", b"close")))
        assert [await application.received.get() for _ in range(2)] == ["read: b1", "read: b2"]
        await until(lambda: offered[-1] == "close")
    assert offered == ["a1", "b1", "a2", "b2", "close"]


async def test_answers_to_texts_that_arrive_together_are_sent_together(server: Server) -> None:
    async with served(server, admits=True) as (application, reader, writer):
        texts = await gone_on(application, reader)
        texts.handle_texts(lambda text: None if texts.send_now(f"answer to {text}") else "not sent")
        written = watched(texts)
        writer.write(ws_frame(b"a") + ws_frame(b"b"))
        assert [await read_ws_frame(reader) for _ in range(2)] == [b"answer to a", b"answer to b"]
        assert len(written) == 1
        writer.write(ws_frame(b"c") + ws_frame(b"\xff"))  # no text: the connection is closed
        assert await read_ws_frame(reader) == b"answer to c"
        assert await until_cut(reader, writer) == 1007


async def test_no_text_is_offered_before_the_application_asks_for_a_message(server: Server) -> None:
    async with served(server, admits=True) as (application, reader, writer):
        offered: list[str] = []
        application.handler = offered.append
        writer.write(ws_frame(b"early"))
        assert b"200 OK" in await exchange(server.address.port, REQUEST)
        assert offered == []
        await gone_on(application, reader)
        await until(lambda: offered == ["early"])


async def test_a_text_in_fragments_is_offered_once_it_is_whole(server: Server) -> None:
    async with served(server, admits=True) as (application, _reader, writer):
        offered: list[str] = []
        application.handler = offered.append
        application.go_on.set()
        writer.write(ws_frame(b"a", fin=False) + PING + ws_frame(b"b", opcode=0) + ws_frame(b"c"))
        await until(lambda: offered == ["ab", "c"])


@pytest.mark.parametrize(
    ("frames", "code"),
    [
        pytest.param([ws_frame(b"\xff")], 1007, id="not UTF-8"),
        pytest.param([ws_frame("\ud800".encode("utf-8", "surrogatepass"))], 1007, id="a surrogate"),
        pytest.param(
            [ws_frame(b"a", fin=False), ws_frame(b"\xff", opcode=0)], 1007, id="not UTF-8 at its end"
        ),
        pytest.param([ws_frame(b"a", reserved=0x40)], 1002, id="an extension"),
        pytest.param([b"\x81\x01a"], 1002, id="no mask"),
        pytest.param([ws_frame(b"a", fin=False), ws_frame(b"b")], 1002, id="within another text"),
        pytest.param([ws_frame(b"x" * (256 * 1024 + 1))], 1009, id="over the limit"),
    ],
)
async def test_what_is_no_text_is_offered_to_nothing_and_ends_the_connection(
    server: Server, frames: list[bytes], code: int, caplog: pytest.LogCaptureFixture
) -> None:
    async with served(server, admits=True) as (application, reader, writer):
        offered: list[str] = []
        application.handler = offered.append
        await gone_on(application, reader)
        for frame in frames:
            writer.write(frame)
        assert await until_cut(reader, writer) == code
        assert await application.ended in {code, 1006}
    assert offered == []
    assert caplog.records == []  # it is the peer's fault, and none of this process


async def test_many_texts_at_once_leave_the_event_loop_to_others(server: Server) -> None:
    async with served(server, admits=True) as (application, _reader, writer):
        offered: list[str] = []
        others: list[int] = []

        def handler(text: str) -> None:
            if not offered:
                asyncio.get_running_loop().call_soon(lambda: others.append(len(offered)))
            offered.append(text)

        application.handler = handler
        application.go_on.set()
        count = int(FRAMES_AT_ONCE)
        writer.write(EMPTY * count)
        await until(lambda: len(offered) == count)
    assert others[0] < count


async def test_a_text_is_sent_at_once_until_the_connection_is_closed(server: Server) -> None:
    async with served(server, admits=True) as (application, reader, writer):
        sent: list[bool] = []
        texts = await gone_on(application, reader)
        sent.append(texts.send_now("at once"))
        assert await read_ws_frame(reader) == b"at once"
        writer.write(ws_frame(b"close") + CLOSE)
        assert await until_cut(reader, writer) == 1000
        sent.append(texts.send_now("too late"))
    assert sent == [True, False]


async def test_a_lost_connection_does_not_wait_for_a_garbage_collection(server: Server) -> None:
    """One of old objects may be hours away, and thousands of nodes reconnect at once."""

    async def serve(socket: BoundedWebSocket) -> None:
        socket.accept("")
        with suppress(SocketClosedError):
            await socket.receive()

    def count() -> int:
        return sum(type(each) is ServerProtocol for each in gc.get_objects())

    server.app, server.serve_socket = answer, serve
    gc.collect()
    gc.disable()
    before = count()
    try:
        for _ in range(3):
            reader, writer = await connected(server)
            writer.write(UPGRADE)
            await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), BOUND_S)
            writer.close()
        await until(lambda: count() <= before)
    finally:
        gc.enable()
