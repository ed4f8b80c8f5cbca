"""The connection: stdio in both protocol eras, its end, its reopening, and a program's environment."""

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from relay.client.remote_tools import connection as module
from relay.remote_tools import (
    BearerToken,
    HttpServer,
    Reason,
    RemoteToolError,
    StdioServer,
    ToolInvalidArguments,
    ToolProviderFailure,
    ToolRule,
    ToolTimeout,
    ToolUnauthorized,
)
from tests.fakes.guarded import Guarded, guarded, over_http, over_stdio
from tests.fakes.mcp_server import FakeMcpServer, HttpAnswer, jsonrpc_error
from tests.fakes.raw_http_server import Asked, RawServer, http_answer, json_answer

pytestmark = pytest.mark.integration

PING = {"message": "ping"}
INFO = {"name": "fake", "version": "1"}
CONNECTIONS_AT_ONCE = 100
"""What the HTTP library has open to a server."""
REPEATABLE = (ToolRule("*", idempotent=True, deadline_s=20),)


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "calls"


@pytest.fixture(params=["modern", "legacy"])
def server(request: pytest.FixtureRequest, log: Path) -> StdioServer:
    return over_stdio(log, request.param)


def received(log: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in log.read_text().splitlines()]


@pytest.mark.holds(
    "SPEC-0004/2.1/discovery",
    "SPEC-0004/2.1/correlation",
    "SPEC-0004/2.2/compatibility",
    "SPEC-0004/4/b-interop",
)
async def test_a_call_over_stdio_has_a_result_and_carries_its_ids(server: StdioServer, log: Path) -> None:
    async with guarded(server) as client:
        assert "add" in {contract.name for contract in await client.tools.list_tools()}
        result = await client.tools.execute("add", {"a": 1, "b": 2}, correlation_id="order-17")
        assert result.structured == {"sum": 3}
    [call] = received(log)
    assert call["_meta"]["edge-kubelet/correlation-id"] == "order-17"
    assert call["_meta"]["traceparent"].startswith("00-")
    assert [record["event"] for record in client.records] == ["started", "ended"]


@pytest.mark.parametrize(
    ("server", "said"),
    [
        (StdioServer("/nonexistent/program"), "/nonexistent/program: No such file or directory"),
        (
            HttpServer("https://127.0.0.1:9/mcp", root=Path("/nonexistent/ca")),
            "/nonexistent/ca: No such",
        ),
        (HttpServer("https://127.0.0.1:9/mcp"), "cannot be reached: Connection refused; nothing was sent"),
    ],
    ids=["program", "root", "port"],
)
async def test_a_server_that_cannot_be_connected_to_is_an_error_with_the_cause(
    server: HttpServer | StdioServer, said: str
) -> None:
    async with guarded(server) as client:
        with pytest.raises(ToolProviderFailure, match=said) as caught:
            await client.tools.list_tools()
    assert (caught.value.reason, caught.value.may_have_run) == (Reason.UNREACHABLE, False)


async def test_a_proxy_that_cannot_be_used_is_no_matter_of_the_credential(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("https_proxy", "socks5://proxy.example")
    async with guarded(HttpServer("https://mcp.example/mcp", BearerToken("secret"))) as client:
        with pytest.raises(ToolProviderFailure, match="https_proxy") as caught:
            await client.tools.list_tools()
    assert (caught.value.reason, "no_proxy" in caught.value.suggested_fix) == (Reason.UNREACHABLE, True)


async def test_a_token_that_cannot_be_read_is_an_error_with_its_file() -> None:
    server = HttpServer("https://127.0.0.1:9/mcp", BearerToken(Path("/nonexistent/token")))
    async with guarded(server) as client:
        with pytest.raises(ToolUnauthorized, match="/nonexistent/token cannot be read as a token: No such"):
            await client.tools.list_tools()


@pytest.mark.holds(
    "SPEC-0004/3.3/provider-failure",
    "SPEC-0004/3.5/non-idempotent-not-retried",
    "SPEC-0004/5/offline-conformance",
)
@pytest.mark.parametrize(
    ("name", "expected", "reason"),
    [
        ("drop", ToolProviderFailure, Reason.CONNECTION_LOST),
        ("disconnect", ToolProviderFailure, Reason.CONNECTION_LOST),
        ("wrong_output", ToolProviderFailure, Reason.RESULT),
        ("failing", ToolProviderFailure, Reason.TOOL_ERROR),
        ("garbage", ToolTimeout, Reason.DEADLINE),
        ("delay", ToolTimeout, Reason.DEADLINE),
    ],
)
async def test_a_fault_over_stdio_is_a_typed_error_and_the_call_is_sent_once(
    server: StdioServer, log: Path, name: str, expected: type[RemoteToolError], reason: Reason
) -> None:
    rules = (ToolRule(name, deadline_s=0.3 if expected is ToolTimeout else 20),)
    async with guarded(server, rules=rules) as client:
        await client.tools.list_tools()
        error = await client.fails(expected, name)
        assert (error.reason, len(received(log))) == (reason, 1)
        # A process that ended is started again; one that lives goes on.
        assert (await client.tools.execute("echo", PING)).structured == PING


async def test_an_idempotent_call_is_repeated_to_a_process_that_was_started_again(
    server: StdioServer, log: Path
) -> None:
    async with guarded(server, rules=REPEATABLE) as client:
        with pytest.raises(ToolProviderFailure):
            await client.tools.execute("drop")
    assert len(received(log)) == 4


async def test_a_program_gets_no_secret_of_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EDGE_TOKEN", "a-secret")
    shown = tmp_path / "environment"
    code = f"import json, os; open({str(shown)!r}, 'w').write(json.dumps(dict(os.environ)))"
    async with guarded(StdioServer(sys.executable, ("-P", "-c", code), {"GIVEN": "1"})) as client:
        with pytest.raises(RemoteToolError):
            await client.tools.list_tools()
    environment = json.loads(shown.read_text())
    assert environment["GIVEN"] == "1"
    assert "EDGE_TOKEN" not in environment


UNKNOWN_SESSION = [
    HttpAnswer(404),
    # npm's reference server, and others made from the TypeScript SDK's example.
    HttpAnswer(
        400, json.dumps({"jsonrpc": "2.0", "id": None, **jsonrpc_error(-32000, "No valid session")}).encode()
    ),
    HttpAnswer(400, b"Bad Request: No valid session ID provided", {"Content-Type": "text/plain"}),
]


@pytest.mark.parametrize("answer", UNKNOWN_SESSION, ids=["404", "400", "400-text"])
async def test_a_session_of_the_old_era_that_ended_is_opened_again(answer: HttpAnswer) -> None:
    fake = FakeMcpServer(legacy=True)
    async with over_http(fake) as client:
        await client.tools.execute("echo", PING)
        fake.next_answer = answer
        error = await client.fails(ToolProviderFailure, "echo", PING)
        assert error.reason is Reason.CONNECTION_LOST
        assert (await client.tools.execute("echo", PING)).structured == PING
        # What a server says of this one call does not end the session.
        fake.next_answer = HttpAnswer(
            400, json.dumps({"jsonrpc": "2.0", "id": None, **jsonrpc_error(-32602, "no")}).encode()
        )
        with pytest.raises(ToolInvalidArguments):
            await client.tools.execute("echo", PING)
        assert (await client.tools.execute("echo", PING)).structured == PING
    assert fake.opened == 2


async def test_a_session_that_a_listing_finds_ended_is_opened_again() -> None:
    fake = FakeMcpServer(legacy=True)
    async with over_http(fake) as client:
        await client.tools.list_tools()
        fake.next_list = UNKNOWN_SESSION[1]
        assert await client.tools.list_tools()
    assert fake.opened == 2


async def test_a_root_that_is_no_certificate_is_the_operators_error(tmp_path: Path) -> None:
    root = tmp_path / "root.pem"
    root.write_text("no certificate")
    async with guarded(HttpServer("https://127.0.0.1:9/mcp", root=root)) as client:
        error = await client.fails(ToolProviderFailure, "echo", PING)
    assert error.reason is Reason.UNREACHABLE
    assert "credential" not in error.suggested_fix
    assert f"{root} holds no certificate in PEM" in str(error)


# --- the HTTP+SSE transport of protocol 2024-11-05, against a server that speaks it by hand


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


@pytest.mark.holds("SPEC-0004/4/b-interop")
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
        error = await client.fails(expected, "echo", PING)
        assert error.reason is reason
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
        error = await client.fails(expected, name)
        assert error.reason is reason
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
    answer = http_answer(404, b"")
    async with RawServer.running(answer) as raw, guarded(HttpServer(f"{raw.url}/sse")) as client:
        with pytest.raises(ToolProviderFailure) as caught:
            await client.tools.list_tools()
    assert caught.value.code == 404


async def test_a_server_that_does_not_answer_the_end_of_its_session_holds_nothing_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "_CLOSED_WITHIN_S", 0.1)
    fake = FakeMcpServer(legacy=True, session="x")
    async with fake.over_http() as url, asyncio.timeout(30):
        async with guarded(HttpServer(url)) as client:
            await client.tools.execute("echo", PING)
        assert not fake.released.is_set()


async def test_a_server_that_answers_nothing_once_a_session_is_open_costs_a_call_its_deadline_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "_CLOSED_WITHIN_S", 0.1)
    opened = {"protocolVersion": "2025-06-18", "capabilities": {"tools": {}}, "serverInfo": INFO}

    async def respond(asked: Asked, writer: asyncio.StreamWriter) -> None:
        message = json.loads(asked.body or "{}")
        if message.get("method") == "initialize":
            answer = {"jsonrpc": "2.0", "id": message["id"], "result": opened}
            writer.write(json_answer(answer, **{"Mcp-Session-Id": "x"}))
            await writer.drain()
        else:
            await gone.wait()

    gone, loop = asyncio.Event(), asyncio.get_running_loop()
    async with RawServer.running(respond) as raw:
        async with guarded(HttpServer(raw.url), mode="legacy") as client:
            began = loop.time()
            await client.fails(ToolTimeout, "echo", PING, deadline_s=0.2)
            assert loop.time() - began < 4  # the SDK itself would wait 5 s more
        gone.set()


async def test_calls_of_the_old_era_that_are_given_up_do_not_use_up_the_connections(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("relay.client.remote_tools.client.LEFT_OPEN_S", 0.2)
    fake = FakeMcpServer(legacy=True)
    async with over_http(fake, rules=(ToolRule("delay", deadline_s=3),)) as client:
        await client.tools.list_tools()
        given_up = [client.fails(ToolTimeout, "delay") for _ in range(CONNECTIONS_AT_ONCE)]
        await asyncio.gather(*given_up)
        assert (await client.tools.execute("echo", PING)).structured == PING
        assert not fake.released.is_set()
