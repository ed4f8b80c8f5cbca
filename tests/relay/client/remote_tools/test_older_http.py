"""The HTTP+SSE transport of protocol 2024-11-05, against a server that speaks it by hand."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest

from relay.client.remote_tools import connection as module
from relay.remote_tools import (
    BearerToken,
    HttpServer,
    Reason,
    RemoteToolError,
    ToolProviderFailure,
    ToolRule,
    ToolTimeout,
    ToolUnauthorized,
)
from tests.fakes.guarded import Guarded, guarded
from tests.fakes.mcp_server import FakeMcpServer
from tests.fakes.raw_http_server import Asked, RawServer, http_answer

pytestmark = pytest.mark.integration

PING = {"message": "ping"}
STREAM = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n"


@dataclass(slots=True)
class OlderServer:
    """A server with its stream of events at ``/sse``, which takes messages at ``endpoint``.

    Attributes:
        fake: what answers.
        first: the bytes with which a stream begins.
        status: the status of each POST of a call; with another than 202 it is not looked at.
        asked: the requests, in order.
    """

    fake: FakeMcpServer = field(default_factory=lambda: FakeMcpServer(legacy=True))
    first: bytes = b"event: endpoint\ndata: /message?sessionId=1\n\n"
    status: int = 202
    asked: list[Asked] = field(default_factory=list)
    streams: list[asyncio.StreamWriter] = field(default_factory=list)

    async def respond(self, asked: Asked, writer: asyncio.StreamWriter) -> None:
        """Answer one request."""
        self.asked.append(asked)
        if asked.head.startswith("GET /sse "):
            self.streams.append(writer)
            writer.write(STREAM + self.first)
            while not writer.transport.is_closing():
                writer.write(b": still here\n\n")
                await writer.drain()
                await asyncio.sleep(0.01)
        elif asked.head.startswith("POST /message?sessionId=1 "):
            await self._take(json.loads(asked.body), writer)
        else:
            writer.write(http_answer(404, b"Cannot POST /sse"))

    async def _take(self, message: dict[str, object], writer: asyncio.StreamWriter) -> None:
        if message["method"] == "tools/call" and self.status != 202:
            writer.write(http_answer(self.status, b""))
            return
        writer.write(http_answer(202, b"Accepted"))
        made = await self.fake.answer(message)
        if isinstance(made, bytes | dict):
            data = made if isinstance(made, bytes) else json.dumps(made).encode()
            self.streams[-1].write(b"event: message\ndata: " + data + b"\n\n")

    def drop(self) -> None:
        """End the stream of events."""
        self.streams[-1].transport.abort()


@asynccontextmanager
async def over_older_http(server: OlderServer, **options: object) -> AsyncIterator[Guarded]:
    async with RawServer.running(server.respond) as raw:
        credential = BearerToken("the-token")
        async with guarded(HttpServer(f"{raw.url}/sse", credential), **options) as client:
            yield client


async def test_a_call_has_a_result_and_carries_its_ids_and_token() -> None:
    server = OlderServer()
    async with over_older_http(server) as client:
        assert {contract.name for contract in await client.tools.list_tools()} >= {"echo", "add"}
        result = await client.tools.execute("echo", PING, correlation_id="order-17")
    assert result.structured == PING
    [call] = [asked for asked in server.asked if b'"tools/call"' in asked.body]
    assert "x-correlation-id: order-17" in call.head.lower()
    assert all("authorization: bearer the-token" in asked.head.lower() for asked in server.asked)
    assert [record["event"] for record in client.records] == ["started", "ended"]


async def test_calls_at_once_do_not_mix() -> None:
    async with over_older_http(OlderServer()) as client:
        calls = [client.tools.execute("echo", {"message": str(number)}) for number in range(20)]
        results = await asyncio.gather(*calls)
    assert [result.structured["message"] for result in results] == [str(number) for number in range(20)]


@pytest.mark.parametrize(
    "first",
    [
        b"event: endpoint\ndata: http://127.0.0.2:1/message\n\n",
        b"event: endpoint\ndata: //elsewhere.example/message\n\n",
        b"event: endpoint\ndata: http://[\n\n",
        b"event: message\ndata: {}\n\n",
        b"event: endpoint\ndata: " + b"x" * 9_000_000,
    ],
    ids=["another origin", "another host", "no URL", "no endpoint", "too large"],
)
async def test_a_stream_that_begins_otherwise_is_not_used(first: bytes) -> None:
    server = OlderServer(first=first)
    async with over_older_http(server) as client:
        with pytest.raises(ToolProviderFailure) as caught:
            await client.tools.list_tools()
    # What the first transport has answered.
    assert (caught.value.code, caught.value.reason) == (404, Reason.HTTP_STATUS)
    assert not any(b'"initialize"' in asked.body and "/message" in asked.head for asked in server.asked)


async def test_a_stream_that_does_not_begin_is_waited_for_in_vain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ENDPOINT_WITHIN_S", 0.2)
    async with over_older_http(OlderServer(first=b"")) as client:
        with pytest.raises(ToolProviderFailure):
            await client.tools.list_tools()


@pytest.mark.parametrize(
    ("status", "expected", "reason"),
    [
        (401, ToolUnauthorized, Reason.HTTP_STATUS),
        (404, ToolProviderFailure, Reason.CONNECTION_LOST),
        (503, ToolProviderFailure, Reason.HTTP_STATUS),
        (504, ToolTimeout, Reason.HTTP_STATUS),
    ],
)
async def test_a_post_that_fails_is_a_typed_error_and_the_connection_goes_on(
    status: int, expected: type[RemoteToolError], reason: Reason
) -> None:
    server = OlderServer()
    async with over_older_http(server) as client:
        await client.tools.list_tools()
        server.status = status
        with pytest.raises(expected) as caught:
            await client.tools.execute("echo", PING)
        assert caught.value.reason is reason
        server.status = 202
        assert (await client.tools.execute("echo", PING)).structured == PING


@pytest.mark.parametrize(
    ("name", "expected", "reason"),
    [
        ("delay", ToolTimeout, Reason.DEADLINE),
        ("garbage", ToolTimeout, Reason.DEADLINE),
        ("huge", ToolProviderFailure, Reason.CONNECTION_LOST),
        ("failing", ToolProviderFailure, Reason.TOOL_ERROR),
    ],
)
async def test_a_fault_is_a_typed_error_and_the_next_call_is_made(
    name: str, expected: type[RemoteToolError], reason: Reason
) -> None:
    server = OlderServer()
    rules = (ToolRule(name, deadline_s=0.3 if expected is ToolTimeout else 20),)
    async with over_older_http(server, rules=rules) as client:
        await client.tools.list_tools()
        with pytest.raises(expected) as caught:
            await client.tools.execute(name)
        assert caught.value.reason is reason
        server.fake.released.set()
        assert (await client.tools.execute("echo", PING)).structured == PING


async def test_a_stream_that_ends_is_opened_again_and_a_call_in_flight_fails() -> None:
    server = OlderServer()
    async with over_older_http(server) as client:
        await client.tools.list_tools()
        call = asyncio.create_task(client.tools.execute("delay"))
        await server.fake.arrived.wait()
        server.drop()
        with pytest.raises(ToolProviderFailure) as caught:
            await call
        assert (caught.value.reason, caught.value.may_have_run) == (Reason.CONNECTION_LOST, True)
        server.fake.released.set()
        assert (await client.tools.execute("echo", PING)).structured == PING
    assert len(server.streams) == 2


async def test_a_server_that_speaks_neither_is_reported_as_before() -> None:
    fake = FakeMcpServer()

    async def respond(_asked: Asked, writer: asyncio.StreamWriter) -> None:
        writer.write(http_answer(404, b""))

    async with RawServer.running(respond) as raw, guarded(HttpServer(f"{raw.url}/sse")) as client:
        with pytest.raises(ToolProviderFailure) as caught:
            await client.tools.list_tools()
    assert caught.value.code == 404
    assert fake.opened == 0
