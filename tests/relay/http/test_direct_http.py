"""Requests to ``/mcp`` that are answered without ASGI, and those that are not: on real sockets."""

import asyncio
import gc
import logging
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress

import pytest
from starlette.types import Receive, Scope, Send

from relay.http.connections import admit
from relay.http.http_protocol import MAX_DIRECT_BYTES, HttpAnswer, PendingAnswer, WholeRequest
from tests.fakes.polling import until
from tests.fakes.raw_connection import connected
from tests.fakes.serving import Server

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.integration]

BOUND_S = 30
BY_ASGI = b'"asgi"'
DIRECTLY = b'"here"'


def request(
    body: bytes = b"{}", line: bytes = b"POST /mcp HTTP/1.1", *headers: bytes, length: bool = True
) -> bytes:
    lines = [line, b"Host: a", *headers, *([b"Content-Length: %d" % len(body)] if length else [])]
    return b"\r\n".join([*lines, b"", body])


class Served:
    """An application that admits each connection, and what answers its requests to ``/mcp`` directly.

    Attributes:
        begun: how many requests ASGI has begun to serve.
        bodies: those that ASGI got, in order.
        requests: what was offered to be answered directly.
        answer: answers directly; a test replaces it.
    """

    def __init__(self, server: Server) -> None:
        server.app, server.begin = self, self.begin
        self.begun = 0
        self.bodies: list[bytes] = []
        self.requests: list[WholeRequest] = []
        self.accepts, self.goes_on = True, False
        self.answer: Callable[[], Awaitable[bytes]] = self._at_once

    async def _at_once(self) -> bytes:
        return DIRECTLY

    def begin(self, request: WholeRequest) -> PendingAnswer | None:
        self.requests.append(request._replace(headers=list(request.headers)))
        return PendingAnswer(self._answered(), self.goes_on) if self.accepts else None

    async def _answered(self) -> HttpAnswer:
        return HttpAnswer(200, await self.answer())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        assert admit(scope, "agent")
        self.begun += 1
        body, more = b"", True
        while more:
            message = await receive()
            body, more = body + message.get("body", b""), message.get("more_body", False)
        self.bodies.append(body)
        headers = [(b"content-length", b"%d" % len(BY_ASGI))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": BY_ASGI})


class Client:
    """One connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    @classmethod
    @asynccontextmanager
    async def admitted(cls, server: Server) -> AsyncIterator["Client"]:
        """Hold a connection that counts towards an agent: its first request was served by ASGI."""
        client = cls(*await connected(server))
        try:
            async with asyncio.timeout(BOUND_S):
                assert await client.ask(request()) == BY_ASGI
                yield client
        finally:
            client.writer.close()

    async def ask(self, *pieces: bytes) -> bytes:
        """Send one request in ``pieces``, and return the body of its answer."""
        for piece in pieces:
            self.writer.write(piece)
            await self.writer.drain()
            if piece is not pieces[-1]:
                await asyncio.sleep(0.01)  # the kernel would join them
        return (await self.answer())[1]

    async def answer(self) -> tuple[bytes, bytes]:
        """Return the head and the body of the next answer."""
        head = await self.reader.readuntil(b"\r\n\r\n")
        _, _, length = head.lower().partition(b"content-length: ")
        return head, await self.reader.readexactly(int(length.partition(b"\r\n")[0]))


async def test_the_first_request_of_a_connection_is_served_by_asgi_and_the_others_are_not(
    server: Server,
) -> None:
    served = Served(server)
    async with Client.admitted(server) as client:
        for target in (b"/mcp?names=dashed", b"/mcp/kinds", b"/mcp/tools?tags=a"):
            assert await client.ask(request(b'{"a":1}', b"POST %b HTTP/1.1" % target)) == DIRECTLY
    assert served.bodies == [b"{}"]
    assert [seen.path for seen in served.requests] == [b"/mcp", b"/mcp/kinds", b"/mcp/tools"]
    seen = served.requests[0]
    assert (seen.address, seen.connection.holder) == ("127.0.0.1", "agent")
    assert (seen.query, seen.body) == (b"names=dashed", b'{"a":1}')
    assert dict(seen.headers) == {b"host": b"a", b"content-length": b"7"}


async def test_an_answer_has_a_type_and_a_length(server: Server) -> None:
    Served(server)
    async with Client.admitted(server) as client:
        client.writer.write(request())
        head, body = await client.answer()
    lines = head.split(b"\r\n")
    assert lines[0] == b"HTTP/1.1 200 OK"
    assert [line.partition(b":")[0] for line in lines[1:-2]] == [b"date", b"content-type", b"content-length"]
    assert b"content-type: application/json" in lines
    assert body == DIRECTLY


@pytest.mark.parametrize(
    "pieces",
    [
        pytest.param([request(b"[1]")[:20], request(b"[1]")[20:]], id="in the head"),
        pytest.param([request(b"[1]")[:-1], request(b"[1]")[-1:]], id="in the body"),
        pytest.param([request(b"[1]")[:-3], request(b"[1]")[-3:]], id="before the body"),
    ],
)
async def test_a_request_in_pieces_is_answered(server: Server, pieces: list[bytes]) -> None:
    served = Served(server)
    async with Client.admitted(server) as client:
        assert await client.ask(*pieces) == DIRECTLY
        assert await client.ask(request()) == DIRECTLY
    assert served.bodies == [b"{}"]
    assert [seen.body for seen in served.requests] == [b"[1]", b"{}"]


CHUNKED = request(b"", b"POST /mcp HTTP/1.1", b"Transfer-Encoding: chunked", length=False)


@pytest.mark.parametrize(
    "begun",
    [
        pytest.param(request(b"x" * (MAX_DIRECT_BYTES + 1))[: -MAX_DIRECT_BYTES - 1], id="by its length"),
        pytest.param(CHUNKED + b"1001\r\n" + b"x" * (MAX_DIRECT_BYTES + 1), id="in a chunk"),
    ],
)
async def test_asgi_begins_with_a_large_body_before_all_of_it_is_received(
    server: Server, begun: bytes
) -> None:
    served = Served(server)
    async with Client.admitted(server) as client:
        client.writer.write(begun)
        await until(lambda: served.begun == 2)
        assert served.bodies == [b"{}"]
    await until(lambda: not len(server.connections))
    assert served.requests == []


async def test_a_body_that_does_not_end_is_cut_off_and_reaches_nothing() -> None:
    async with Server.running(request_timeout_s=0.2) as server:
        served = Served(server)
        async with Client.admitted(server) as client:
            client.writer.write(request(b"[1]")[:-1])
            with suppress(ConnectionError):
                assert await client.reader.read() == b""
            await until(lambda: not len(server.connections))
    assert (served.bodies, served.requests) == ([b"{}"], [])


async def test_a_request_that_is_being_received_is_answered_by_a_server_that_ends() -> None:
    async with AsyncExitStack() as running:
        server = await running.enter_async_context(Server.running())
        Served(server)
        async with Client.admitted(server) as client:
            client.writer.write(request(b"[1]")[:-1])
            # What came on another connection after it is answered, so it has been received.
            async with Client.admitted(server):
                pass
            ending = asyncio.create_task(running.pop_all().aclose())
            assert (await client.answer())[0].startswith(b"HTTP/1.1 404 ")  # by what replaces the application
            client.writer.write(b"]")
            assert await client.reader.read() == b""
            await ending


@pytest.mark.parametrize(
    ("raw", "body"),
    [
        pytest.param(request(b"", b"GET /mcp HTTP/1.1"), b"", id="another method"),
        pytest.param(request(b"{}", b"POST /mcp/ HTTP/1.1"), b"{}", id="another path"),
        pytest.param(request(b"{}", b"POST /mcpx HTTP/1.1"), b"{}", id="a longer path"),
        pytest.param(request(b"{}", b"POST /%6dcp HTTP/1.1"), b"{}", id="an escaped path"),
        pytest.param(request(b"{}", b"POST http://a/mcp HTTP/1.1"), b"{}", id="a whole URL"),
        pytest.param(request(b"{}", b"POST /mcp?a#b HTTP/1.1"), b"{}", id="a fragment"),
    ],
)
async def test_another_request_is_served_by_asgi(server: Server, raw: bytes, body: bytes) -> None:
    served = Served(server)
    async with Client.admitted(server) as client:
        assert await client.ask(raw) == BY_ASGI
    assert served.bodies == [b"{}", body]
    assert served.requests == []


async def test_a_client_that_waits_to_send_its_body_may_send_it(server: Server) -> None:
    served = Served(server)
    async with Client.admitted(server) as client:
        head, body = request(b"{}", b"POST /mcp HTTP/1.1", b"Expect: 100-continue")[:-2], b"{}"
        client.writer.write(head)
        assert (await client.reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 100")
        assert await client.ask(body) == BY_ASGI
    assert served.requests == []


async def test_a_body_in_chunks_is_put_together_without_its_trailer(server: Server) -> None:
    served = Served(server)
    chunked = request(
        b"1\r\n{\r\n1\r\n}\r\n0\r\nAuthorization: x\r\n\r\n",
        b"POST /mcp HTTP/1.1",
        b"Transfer-Encoding: chunked",
        length=False,
    )
    async with Client.admitted(server) as client:
        assert await client.ask(chunked) == DIRECTLY
    assert served.requests[0].body == b"{}"
    assert [name for name, _ in served.requests[0].headers] == [b"host", b"transfer-encoding"]


async def test_asgi_gets_all_of_a_request_that_is_not_begun(server: Server) -> None:
    served = Served(server)
    served.accepts = False
    async with Client.admitted(server) as client:
        for body in (b"", b"{}", b"x" * 100_000):
            assert await client.ask(request(body)) == BY_ASGI
    assert served.bodies[1:] == [b"", b"{}", b"x" * 100_000]


async def test_requests_behind_one_that_is_answered_directly_wait_for_it(server: Server) -> None:
    served, go_on = Served(server), asyncio.Event()

    async def later() -> bytes:
        await go_on.wait()
        return DIRECTLY

    served.answer = later
    async with Client.admitted(server) as client:
        client.writer.write(request(b"1") + request(b"2") + request(b"3"))
        await until(lambda: served.requests)
        go_on.set()
        bodies = [(await client.answer())[1] for _ in range(3)]
    assert bodies == [DIRECTLY] * 3
    assert [request.body for request in served.requests] == [b"1", b"2", b"3"]


async def test_a_request_ends_at_once_when_its_client_disconnects(server: Server) -> None:
    served, ended = Served(server), asyncio.Event()

    async def never() -> bytes:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()
        return b""

    served.answer = never
    async with Client.admitted(server) as client:
        client.writer.write(request() + request())
        await until(lambda: served.requests)
        client.writer.close()
        await ended.wait()
    await until(lambda: not len(server.connections))


async def test_a_request_that_goes_on_is_answered_for_itself_when_its_client_disconnects(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    served, go_on, ended = Served(server), asyncio.Event(), asyncio.Event()

    async def waits() -> bytes:
        await go_on.wait()
        ended.set()
        return DIRECTLY

    served.answer, served.goes_on = waits, True
    async with Client.admitted(server) as client:
        client.writer.write(request())
        await until(lambda: served.requests)
        client.writer.close()
        await until(lambda: not len(server.connections))
        go_on.set()
        await ended.wait()
    assert not caplog.records


async def test_a_client_that_ends_its_side_behind_its_request_is_answered(server: Server) -> None:
    Served(server)
    async with Client.admitted(server) as client:
        client.writer.write(request())
        client.writer.write_eof()
        assert (await client.answer())[1] == DIRECTLY
        assert await client.reader.read() == b""


@pytest.mark.parametrize(
    "line", [b"POST /mcp HTTP/1.1\r\nConnection: close", b"POST /mcp HTTP/1.0"], ids=["asked for", "HTTP/1.0"]
)
async def test_a_connection_that_is_not_kept_is_closed_after_the_answer(server: Server, line: bytes) -> None:
    Served(server)
    async with Client.admitted(server) as client:
        client.writer.write(request(b"{}", line))
        head, body = await client.answer()
        assert b"\r\nconnection: close\r\n" in head
        assert body == DIRECTLY
        assert await client.reader.read() == b""


async def test_a_bug_is_answered_and_logged_and_ends_the_connection(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    served = Served(server)

    async def fails() -> bytes:
        raise LookupError

    served.answer = fails
    async with Client.admitted(server) as client:
        with caplog.at_level(logging.ERROR, "uvicorn.error"):
            client.writer.write(request())
            head, _ = await client.answer()
        assert head.startswith(b"HTTP/1.1 500 ")
        assert await client.reader.read() == b""
    assert [type(line.exc_info[1]) for line in caplog.records if line.exc_info] == [LookupError]


async def test_what_the_server_ends_is_answered() -> None:
    begun = asyncio.Event()

    async def never() -> bytes:
        begun.set()
        await asyncio.Event().wait()
        return b""

    async with Server.running() as server:
        served = Served(server)
        served.answer = never
        async with Client.admitted(server) as client:
            client.writer.write(request())
            await begun.wait()
            (task,) = (task for task in asyncio.all_tasks() if "BoundedHttp" in repr(task.get_coro()))
            task.cancel()
            assert (await client.answer())[0].startswith(b"HTTP/1.1 500 ")


async def test_a_client_that_does_not_read_gets_no_further_answers(server: Server) -> None:
    served, large = Served(server), b"x" * 8_000_000
    answered = 0

    async def much() -> bytes:
        nonlocal answered
        answered += 1
        return large

    served.answer = much
    async with Client.admitted(server) as client:
        client.writer.write(request())
        await until(lambda: answered)
        client.writer.write(request() + request())
        # What came on another connection after them is answered, so they have been received.
        async with Client.admitted(server):
            pass
        assert answered <= 2  # one is on its way, and one waits until it is read
        assert (await client.answer())[1] == large
        assert (await client.answer())[1] == large


async def test_a_request_leaves_nothing_to_the_garbage_collector_and_no_header(server: Server) -> None:
    served, tasks, headers = Served(server), list[weakref.ref[object]](), list[object]()

    async def noted() -> bytes:
        tasks.append(weakref.ref(asyncio.current_task()))
        return DIRECTLY

    def begin(request: WholeRequest) -> PendingAnswer | None:
        headers.append(request.headers)
        return Served.begin(served, request)

    served.answer, server.begin = noted, begin
    async with Client.admitted(server) as client:
        gc.disable()
        try:
            for _ in range(2):
                assert await client.ask(request()) == DIRECTLY
            await asyncio.sleep(0)
            assert [task() for task in tasks] == [None, None]
        finally:
            gc.enable()
    assert headers == [[], []]


async def test_a_malformed_body_ends_the_connection_without_an_answer_of_the_application(
    server: Server,
) -> None:
    served = Served(server)
    malformed = request(
        b"1\r\n{\r\nzz\r\n", b"POST /mcp HTTP/1.1", b"Transfer-Encoding: chunked", length=False
    )
    async with Client.admitted(server) as client:
        client.writer.write(malformed)
        with suppress(ConnectionError):
            assert (await client.reader.read()).startswith(b"HTTP/1.1 400 ")
    assert (served.bodies, served.requests) == ([b"{}"], [])
