"""What requests without credentials may make the relay hold: on real sockets, with the product's server."""

import asyncio
import gc
import weakref
from contextlib import suppress
from functools import partial
from typing import Any

import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from relay.http.connections import admit
from relay.http.http_protocol import MAX_FIELDS, MAX_HEAD_BYTES, MAX_PIPELINED, JoinedHead
from relay.http.request_meter import RequestMeter
from relay.http.websocket_protocol import BoundedWebSocket
from tests.fakes.polling import until
from tests.fakes.raw_connection import connected, write_until_cut
from tests.fakes.raw_http import UPGRADE, exchange
from tests.fakes.serving import Server

pytestmark = pytest.mark.asyncio(loop_scope="module")

BOUND_S = 30
REQUEST = b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
UPLOAD = REQUEST.replace(b"GET", b"POST")[:-2] + b"Content-Length: 100000\r\n\r\n" + b"x" * 100_000
CHUNKED = b"POST / HTTP/1.1\r\nHost: 127.0.0.1\r\nTransfer-Encoding: chunked\r\n\r\n"


class Held:
    """An application that answers when it is told to, or at once, and notices when the client leaves."""

    def __init__(self, *, at_once: bool = False) -> None:
        self.begun = 0
        self.left = asyncio.Event()
        self.answer = asyncio.Event()
        if at_once:
            self.answer.set()

    async def __call__(self, _scope: Scope, receive: Receive, send: Send) -> None:
        self.begun += 1
        await receive()
        left = asyncio.ensure_future(receive())
        answer = asyncio.create_task(self.answer.wait())
        await asyncio.wait([left, answer], return_when=asyncio.FIRST_COMPLETED)
        if left.done():
            self.left.set()
        left.cancel()
        answer.cancel()
        headers = [(b"content-length", b"2")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b"ok"})


async def size_of_body(request: Request) -> JSONResponse:
    return JSONResponse(len(await request.body()))


@pytest.mark.parametrize(
    "start",
    [
        pytest.param(b"GET / HTTP/1.1\r\nX: ", id="one header"),
        pytest.param(b"GET /", id="the path"),
        pytest.param(CHUNKED + b"0\r\nX: ", id="a trailer"),
        pytest.param(CHUNKED + b"1;x=", id="a chunk's extension"),
    ],
)
async def test_a_head_or_what_follows_a_body_that_never_ends_ends_the_connection(
    server: Server, start: bytes
) -> None:
    server.app = Starlette()
    reader, writer = await connected(server)
    writer.write(start)
    # What is on its way in buffers comes on top of the limit; it is not held.
    assert await write_until_cut(reader, writer, b"x" * 16_384) < MAX_HEAD_BYTES + 32 * 1024 * 1024


@pytest.mark.parametrize(
    "raw",
    [
        pytest.param(REQUEST[:-2] + b"X: y\r\n" * MAX_FIELDS + b"\r\n", id="fields"),
        pytest.param(REQUEST[:-2] + b"X: %b\r\n\r\n" % (b"y" * MAX_HEAD_BYTES), id="a value"),
        pytest.param(REQUEST.replace(b"/", b"/" + b"y" * MAX_HEAD_BYTES, 1), id="the path"),
    ],
)
async def test_a_head_over_its_limits_is_not_served_though_it_is_whole(server: Server, raw: bytes) -> None:
    server.app = held = Held(at_once=True)
    assert b"200 OK" not in await exchange(server.address.port, raw)
    assert held.begun == 0


async def test_a_head_of_as_many_fields_as_it_may_have_is_served(server: Server) -> None:
    server.app = Held(at_once=True)
    fields = b"X: y\r\n" * (MAX_FIELDS - 2) + b"Connection: close\r\n"
    assert b"200 OK" in await exchange(server.address.port, REQUEST[:-2] + fields + b"\r\n")


@pytest.mark.parametrize(
    "begun", [b"", b"3\r\nxyz\r\n0\r\nX: y\r", b"0\r\n\r"], ids=["no", "trailer", "chunk"]
)
async def test_each_request_behind_a_chunked_body_has_its_price(
    server: Server, monkeypatch: pytest.MonkeyPatch, begun: bytes
) -> None:
    """``begun``: what of the body comes with its head; the rest comes with the requests behind it."""
    costs: list[float] = []
    enter = RequestMeter.enter

    def counted(meter: RequestMeter, source: Any, share: Any, cost: float, *more: Any, **options: Any) -> Any:
        costs.append(cost)
        return enter(meter, source, share, cost, *more, **options)

    is_begun = asyncio.Event()

    async def read(scope: Scope, receive: Receive, send: Send) -> None:
        is_begun.set()
        while (await receive()).get("more_body", False):
            pass
        await JSONResponse("read")(scope, receive, send)

    monkeypatch.setattr(RequestMeter, "enter", counted)
    server.app = read
    reader, writer = await connected(server)
    writer.write(CHUNKED + begun)
    await is_begun.wait()
    rest = {b"": b"0\r\n\r\n", b"0\r\n\r": b"\n"}.get(begun, b"\n\r\n")
    writer.write(rest + REQUEST * 7)
    answers = b""
    async with asyncio.timeout(BOUND_S):
        while answers.count(b'"read"') < 8:
            answers += await reader.read(65_536)
    writer.close()
    assert sum(cost >= 1 for cost in costs) == 9  # the connection, and eight requests


async def test_fields_of_a_trailer_are_dropped(server: Server) -> None:
    async def names(scope: Scope, receive: Receive, send: Send) -> None:
        while (await receive()).get("more_body", False):
            pass
        await JSONResponse([name.decode() for name, _ in scope["headers"]])(scope, receive, send)

    server.app = names
    chunked = (
        CHUNKED.replace(b"Host", b"Connection: close\r\nHost") + b"1\r\nx\r\n0\r\nAuthorization: x\r\n\r\n"
    )
    assert b'["connection","host","transfer-encoding"]' in await exchange(server.address.port, chunked)


async def test_an_upgrade_behind_a_request_waits_for_its_answer(server: Server) -> None:
    server.app = held = Held()
    accepted = asyncio.Event()

    async def accept(socket: BoundedWebSocket) -> None:
        accepted.set()
        socket.accept("")

    server.serve_socket = accept
    reader, writer = await connected(server)
    writer.write(REQUEST + UPGRADE)
    await until(lambda: held.begun)
    assert not accepted.is_set()
    held.answer.set()
    async with asyncio.timeout(BOUND_S):
        assert (await reader.readuntil(b"ok")).startswith(b"HTTP/1.1 200")
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 101")
    writer.close()


async def test_a_body_may_be_longer_than_a_head(server: Server) -> None:
    server.app = Starlette(routes=[Route("/", size_of_body, methods=["POST"])])
    reader, writer = await connected(server)
    size = MAX_HEAD_BYTES * 4
    writer.write(b"POST / HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: %d\r\n\r\n" % size + b"x" * size)
    async with asyncio.timeout(BOUND_S):
        head = await reader.readuntil(b"\r\n\r\n")
        body = await reader.readexactly(len(str(size)))
    writer.close()
    assert head.startswith(b"HTTP/1.1 200")
    assert int(body) == size


async def test_as_many_requests_as_may_wait_are_answered(server: Server) -> None:
    server.app = Held(at_once=True)
    reader, writer = await connected(server)
    writer.write(REQUEST * (MAX_PIPELINED + 1))
    async with asyncio.timeout(BOUND_S):
        for _ in range(MAX_PIPELINED + 1):
            assert (await reader.readuntil(b"ok")).startswith(b"HTTP/1.1 200")
    writer.close()


async def test_more_requests_than_may_wait_end_the_connection(server: Server) -> None:
    server.app = held = Held()
    reader, writer = await connected(server)
    writer.write(REQUEST * 1000)
    async with asyncio.timeout(BOUND_S):
        with suppress(ConnectionError):
            assert await reader.read() == b""
        await held.left.wait()
    writer.close()
    assert held.begun == 1


async def test_what_is_served_learns_that_its_client_left_also_when_another_request_waits(
    server: Server,
) -> None:
    server.app = held = Held()
    _, writer = await connected(server)
    writer.write(REQUEST * 2)
    await until(lambda: held.begun)
    writer.close()
    async with asyncio.timeout(BOUND_S):
        await held.left.wait()


@pytest.mark.parametrize("behind", [REQUEST, UPLOAD], ids=["a request", "a long body"])
async def test_a_stream_ends_with_its_client_whatever_came_behind_it(server: Server, behind: bytes) -> None:
    server.app = held = Held()
    _, writer = await connected(server)
    writer.write(REQUEST)
    await until(lambda: held.begun)
    await asyncio.sleep(0)  # it waits for its client to leave
    writer.write(behind)
    await writer.drain()
    # What came on another connection after it is answered, so it has been received.
    server.app = Held(at_once=True)
    assert b"200 OK" in await exchange(server.address.port, REQUEST[:-2] + b"Connection: close\r\n\r\n")
    writer.close()
    async with asyncio.timeout(BOUND_S):
        await held.left.wait()


@pytest.mark.integration
@pytest.mark.parametrize(
    "said",
    [
        pytest.param(b"", id="nothing"),
        pytest.param(b"GET / HT", id="half a head"),
        pytest.param(b"\r\n" * 100, id="empty lines"),
        pytest.param(
            REQUEST.replace(b"GET", b"POST")[:-2] + b"Content-Length: 9\r\n\r\nhalf", id="half a body"
        ),
        pytest.param(
            REQUEST.replace(b"GET", b"POST")[:-2]
            + b"Upgrade: h2c\r\nConnection: Upgrade\r\nContent-Length: 9\r\n\r\nhalf",
            id="another upgrade",
        ),
        pytest.param(b"CONNECT a:80 HTTP/1.1\r\nHost: a\r\n\r\n", id="a tunnel"),
    ],
)
async def test_what_is_no_whole_request_in_time_ends_the_connection(said: bytes) -> None:
    async with Server.running(request_timeout_s=0.2) as server:
        server.app = Starlette(routes=[Route("/", size_of_body, methods=["POST"])])
        reader, writer = await connected(server)
        writer.write(said)
        # What uvicorn answered and keeps open is followed by bytes that are no request.
        with suppress(ConnectionError):
            async with asyncio.timeout(BOUND_S):
                while not reader.at_eof():
                    writer.write(b"\r\n" if said else b"")
                    await reader.read(65_536)
        writer.close()
        await until(lambda: not len(server.connections))


@pytest.mark.integration
async def test_a_request_that_is_served_has_more_time_than_it_had_to_come_in() -> None:
    async with Server.running(request_timeout_s=0.2) as server:
        server.app = held = Held()
        reader, writer = await connected(server)
        writer.write(REQUEST)
        await until(lambda: held.begun)
        # A connection that came later and says nothing runs out of its time before.
        other, other_writer = await connected(server)
        async with asyncio.timeout(BOUND_S):
            with suppress(ConnectionError):
                await other.read()
            held.answer.set()
            assert (await reader.readuntil(b"ok")).startswith(b"HTTP/1.1 200")
        writer.close()
        other_writer.close()


class Begun:
    """An application whose answer begins, and goes on when it is told to."""

    def __init__(self) -> None:
        self.go_on = asyncio.Event()

    async def __call__(self, _scope: Scope, _receive: Receive, send: Send) -> None:
        headers = [(b"content-type", b"text/event-stream")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await self.go_on.wait()
        await send({"type": "http.response.body", "body": b"data: 1\n\n", "more_body": True})
        await send({"type": "http.response.body", "body": b""})


async def test_the_head_of_a_stream_does_not_wait_for_its_first_event(server: Server) -> None:
    server.app = begun = Begun()
    reader, writer = await connected(server)
    writer.write(REQUEST)
    async with asyncio.timeout(BOUND_S):
        head = await reader.readuntil(b"\r\n\r\n")
        begun.go_on.set()
        body = await reader.readuntil(b"0\r\n\r\n")
    writer.close()
    assert head.startswith(b"HTTP/1.1 200")
    assert b"data: 1" in body


class Sent(asyncio.Transport):
    """Notes each write."""

    def __init__(self) -> None:
        super().__init__()
        self.writes: list[bytes] = []

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.writes.append(bytes(data))

    def is_closing(self) -> bool:
        return False

    def close(self) -> None:
        self.writes.append(b"(closed)")


async def test_a_head_is_written_together_with_what_follows_at_once() -> None:
    sent = Sent()
    joined = JoinedHead(sent)
    joined.write(b"head ")
    joined.write(b"body ")
    joined.write(b"more")
    joined.close()
    assert sent.writes == [b"head body ", b"more", b"(closed)"]


async def test_a_head_alone_is_written_before_the_end() -> None:
    sent = Sent()
    joined = JoinedHead(sent)
    joined.write(b"head")
    joined.close()
    await asyncio.sleep(0)
    assert sent.writes == [b"head", b"(closed)"]


async def test_that_the_client_may_go_on_is_not_held_back() -> None:
    sent, interim = Sent(), b"HTTP/1.1 100 Continue\r\n\r\n"
    joined = JoinedHead(sent)
    joined.write(interim)
    joined.write(b"head ")
    joined.write(b"body")
    assert sent.writes == [interim, b"head body"]


async def test_a_client_that_waits_to_send_its_body_may_send_it(server: Server) -> None:
    server.app = Starlette(routes=[Route("/", size_of_body, methods=["POST"])])
    reader, writer = await connected(server)
    writer.write(b"POST / HTTP/1.1\r\nHost: a\r\nExpect: 100-continue\r\nContent-Length: 2\r\n\r\n")
    async with asyncio.timeout(BOUND_S):
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 100 ")
        writer.write(b"ok")
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 ")
        assert await reader.readexactly(1) == b"2"
    writer.close()


async def test_a_served_request_leaves_nothing_to_the_garbage_collector(server: Server) -> None:
    responses: list[weakref.ref[object]] = []

    async def ok(scope: Scope, receive: Receive, send: Send) -> None:
        responses.append(weakref.ref(receive.__self__))  # type: ignore[attr-defined]  # uvicorn's own
        await JSONResponse("ok")(scope, receive, send)

    server.app = ok
    reader, writer = await connected(server)
    gc.disable()
    try:
        async with asyncio.timeout(BOUND_S):
            for _ in range(2):  # the connection keeps its last response
                writer.write(REQUEST)
                await reader.readuntil(b'"ok"')
        assert [response() is None for response in responses] == [True, False]
    finally:
        gc.enable()
        writer.close()


@pytest.fixture
def short_idleness(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let servers close connections that are idle for a moment."""
    config = partial(uvicorn.Config, timeout_keep_alive=0.2)  # type: ignore[arg-type]  # seconds
    monkeypatch.setattr("relay.http.listener.Config", config)


async def answered(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(REQUEST)
    assert (await reader.readuntil(b"ok")).startswith(b"HTTP/1.1 200")


@pytest.mark.integration
@pytest.mark.usefixtures("short_idleness")
async def test_an_idle_connection_is_closed_and_one_whose_request_is_served_is_not() -> None:
    async with Server.running() as server, asyncio.timeout(BOUND_S):
        server.app = held = Held(at_once=True)
        reader, writer = await connected(server)
        await answered(reader, writer)
        held.answer.clear()
        writer.write(REQUEST)
        await until(lambda: held.begun == 2)
        # The timer of this connection began before that of one that is idle until it is closed.
        server.app = Held(at_once=True)
        idle_reader, idle_writer = await connected(server)
        await answered(idle_reader, idle_writer)
        assert await idle_reader.read() == b""
        held.answer.set()
        assert (await reader.readuntil(b"ok")).startswith(b"HTTP/1.1 200")
        assert await reader.read() == b""
        writer.close()
        idle_writer.close()


@pytest.mark.integration
@pytest.mark.usefixtures("short_idleness")
async def test_an_idle_connection_that_an_agent_holds_outlives_those_of_strangers() -> None:
    async with Server.running() as server, asyncio.timeout(BOUND_S):
        served = Held(at_once=True)

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            assert scope["path"] != "/agent" or admit(scope, "an agent")
            await served(scope, receive, send)

        server.app = app
        agent_reader, agent_writer = await connected(server)
        agent_writer.write(REQUEST.replace(b"/", b"/agent", 1))
        assert (await agent_reader.readuntil(b"ok")).startswith(b"HTTP/1.1 200")
        reader, writer = await connected(server)
        await answered(reader, writer)
        assert await reader.read() == b""
        await answered(agent_reader, agent_writer)
        for each in (writer, agent_writer):
            each.close()
