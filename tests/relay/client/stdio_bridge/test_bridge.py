import asyncio
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import pytest_asyncio

from relay.client.credentials import RenewableToken, keep_token
from relay.client.stdio_bridge.bridge import DRAIN_TIMEOUT_S, MAX_IN_FLIGHT, MAX_SUBSCRIPTIONS, Bridge
from relay.client.stdio_bridge.delivery import Conversation
from relay.client.stdio_bridge.http_client import RelayHttp
from relay.client.stdio_bridge.messages import MAX_LINE_BYTES, header_value
from relay.http.connections import AcceptedConnection, Connections
from schemas.addresses import mcp_url
from schemas.process.logs import make_logger
from schemas.tls import client_context
from tests.fakes.bridged import ME, META, NEW, OLD, LineClient
from tests.fakes.hub import Hub
from tests.fakes.lines import LogLines
from tests.fakes.ports import unused_port
from tests.fakes.raw_http_server import Asked, RawServer, json_answer
from tests.fakes.served_relay import ServedRelay
from tests.fakes.serving import Server
from tests.fakes.signer import NOW_MS, SimulatedNode

pytestmark = pytest.mark.asyncio(loop_scope="module")

BOUND_S = 30
ERAS = pytest.mark.parametrize("era", [OLD, NEW])
CHANGED = "notifications/tools/list_changed"
OPENING = {"protocolVersion": OLD, "capabilities": {}, "clientInfo": ME}


@pytest.fixture
def node(hub: Hub) -> SimulatedNode:
    return hub.ca.issue()


@pytest_asyncio.fixture(loop_scope="module")
async def client(relay: ServedRelay, hub: Hub) -> AsyncIterator[LineClient]:
    async with LineClient.over_bridge(relay.mcp_url, hub.token()) as client:
        yield client


def echo_of(node: SimulatedNode) -> str:
    return f"sysecho.{node.node_id}.echo.invoke"


def echoed(node: SimulatedNode, message: str) -> dict[str, Any]:
    return {"message": message, "node_id": node.node_id, "received_at_ms": NOW_MS}


def comparable(line: bytes) -> bytes:
    """Return a line but for the correlation id, which is another one at each call."""
    return re.sub(rb'(correlation_id\\*": ?\\*")[0-9A-Z]{26}', rb"\1", line)


# --- the same as over HTTP


REQUESTS = [
    pytest.param(("tools/list", {}), id="list"),
    pytest.param(("tools/call", {"name": "ECHO", "arguments": {"wrong": 1}}), id="arguments"),
    pytest.param(("tools/call", {"name": "no such name", "arguments": {}}), id="name"),
    pytest.param(("tools/call", {"name": "nämä\r\nx: y", "arguments": {}}), id="name-for-no-header"),
    pytest.param(("tools/call", {"name": 7}), id="no-name"),
    pytest.param(("resources/list", {}), id="resources"),
    pytest.param(("resources/read", {"uri": "node://unknown/manifest"}), id="no-resource"),
    pytest.param(("no/such/method", {}), id="method"),
]


@pytest.mark.parametrize("wanted", REQUESTS)
async def test_the_same_answers_as_over_http_in_the_new_era(
    relay: ServedRelay, hub: Hub, client: LineClient, node: SimulatedNode, wanted: tuple[str, dict[str, Any]]
) -> None:
    method, params = wanted
    async with relay.session(node):
        message = _message(1, method, _named(params, node) | {"_meta": META})
        client.write(message + b"\n")
        await client.next()
        headers = [*_headers(hub), ("MCP-Protocol-Version", NEW), ("Mcp-Method", method)]
        if isinstance(name := _named(params, node).get("name", params.get("uri")), str):
            headers.append(("Mcp-Name", header_value(name)))
        there = await relay.ask("POST /mcp", headers, message)
    assert [comparable(line) for line in client.lines] == [comparable(there.body)]


@pytest.mark.parametrize("wanted", REQUESTS)
async def test_the_same_answers_as_over_http_in_the_old_era(
    relay: ServedRelay, hub: Hub, client: LineClient, node: SimulatedNode, wanted: tuple[str, dict[str, Any]]
) -> None:
    method, params = wanted
    async with relay.session(node):
        await client.open(OLD)
        message = _message(9, method, _named(params, node))
        client.write(message + b"\n")
        await client.answer(9)
        headers = _headers(hub)
        started = await relay.ask("POST /mcp", headers, _message(1, "initialize", OPENING))
        headers.append(("Mcp-Session-Id", started.headers["mcp-session-id"]))
        there = await relay.ask("POST /mcp", headers, message)
    [data] = [line[6:] for line in there.body.splitlines() if line.startswith(b"data: {")]
    assert comparable(client.lines[-1]) == comparable(data)


def _named(params: dict[str, Any], node: SimulatedNode) -> dict[str, Any]:
    return params | ({"name": echo_of(node)} if params.get("name") == "ECHO" else {})


def _headers(hub: Hub) -> list[tuple[str, str]]:
    return [
        ("Authorization", f"Bearer {hub.token()}"),
        ("Content-Type", "application/json"),
        ("Accept", "application/json, text/event-stream"),
    ]


def _message(number: int, method: str, params: dict[str, Any]) -> bytes:
    return json.dumps({"jsonrpc": "2.0", "id": number, "method": method, "params": params}).encode()


@ERAS
async def test_a_call_reaches_the_node_and_its_result_comes_back(
    relay: ServedRelay, client: LineClient, node: SimulatedNode, era: str
) -> None:
    async with relay.session(node) as end:
        await client.open(era)
        request = client.request("tools/call", era, name=echo_of(node), arguments={"message": "hello"})
        command = await end.receive("cmd")
        result = echoed(node, "hello")
        await end.acknowledge(command, result)
        answer = await client.answer(request)
        assert answer["result"]["structuredContent"] == result


async def test_names_are_listed_as_the_url_says(relay: ServedRelay, hub: Hub, node: SimulatedNode) -> None:
    url = f"{relay.mcp_url}?names=dashed"
    async with relay.session(node), LineClient.over_bridge(url, hub.token()) as client:
        listed = await client.ask("tools/list")
    assert all("." not in tool["name"] for tool in listed["result"]["tools"])
    assert listed["result"]["tools"]


# --- lines


GARBAGE = [
    b"nonsense",
    b"{",
    b"[]",
    b'"text"',
    b'{"id":1,"id":1}',
    b"\xff\xfe",
    b'{"id":null,"method":"ping"}',
]


@ERAS
@pytest.mark.parametrize("garbage", GARBAGE)
async def test_a_line_that_is_no_message_gets_the_relay_s_own_answer_and_harms_nothing(
    client: LineClient, era: str, garbage: bytes
) -> None:
    await client.open(era)
    client.write(b"\n \r\n" + garbage + b"\n")
    refusal = await client.next()
    assert refusal["id"] is None
    assert refusal["error"]["code"] in {-32700, -32600, -32602}
    assert "result" in await client.ask("tools/list", era)


@ERAS
async def test_a_line_over_a_mebibyte_is_refused_and_the_next_one_served(
    client: LineClient, era: str
) -> None:
    await client.open(era)
    client.write(b'{"id":1,"params":"')
    for _ in range(40):
        client.write(b"x" * 65_536)
    client.write(b'"}\n')
    refusal = await client.next()
    assert (refusal["id"], refusal["error"]["code"]) == (None, -32600)
    assert "result" in await client.ask("tools/list", era)


async def test_the_longest_line_goes_through(client: LineClient) -> None:
    fill = len(json.dumps({"jsonrpc": "2.0", "id": 1, "method": "x", "params": {"_meta": META, "x": ""}}))
    params = {"_meta": META, "x": "x" * (MAX_LINE_BYTES - fill)}
    client.say({"id": 1, "method": "x", "params": params})
    assert (await client.next())["error"]["code"] == -32601


async def test_the_last_line_needs_no_newline(client: LineClient) -> None:
    client.write(
        json.dumps({"jsonrpc": "2.0", "id": 1, "method": "tools/list", "params": {"_meta": META}}).encode()
    )
    client.end()
    assert "result" in await client.next()
    await client.until_ended()


async def test_a_name_that_no_header_can_hold_is_refused_here(relay: ServedRelay, client: LineClient) -> None:
    before = len(relay.requests)
    answer = await client.ask("resources/read", uri="x" * 100_000)
    assert answer["error"]["code"] == -32602
    assert len(relay.requests) == before


# --- many at once


@pytest.mark.long
@ERAS
async def test_a_thousand_requests_in_one_go_are_all_answered(client: LineClient, era: str) -> None:
    await client.open(era)
    method = "ping" if era == OLD else "server/discover"
    requests = {client.request(method, era) for _ in range(1000)}
    answers = [await client.next() for _ in range(1000)]
    assert {answer["id"] for answer in answers} == requests
    # Above its rate the relay refuses them before it reads them, and they are sent again.
    assert all("result" in answer for answer in answers)


@ERAS
async def test_one_that_waits_holds_up_no_other(
    relay: ServedRelay, client: LineClient, node: SimulatedNode, era: str
) -> None:
    async with relay.session(node) as end:
        await client.open(era)
        slow = client.request("tools/call", era, name=echo_of(node), arguments={"message": "slow"})
        command = await end.receive("cmd")
        assert "result" in await client.ask("tools/list", era)
        await end.acknowledge(command, echoed(node, "slow"))
        assert (await client.answer(slow))["result"]["isError"] is False


async def test_what_opens_a_session_is_overtaken_by_nothing(client: LineClient) -> None:
    # All in one write, as a script does it that does not wait for answers.
    client.request("initialize", OLD, **OPENING)
    client.say({"method": "notifications/initialized"})
    requests = [client.request("ping", OLD) for _ in range(20)]
    assert (await client.next())["result"]["protocolVersion"] == OLD
    answers = [await client.next() for _ in requests]
    assert sorted(answer["id"] for answer in answers) == requests
    assert all("result" in answer for answer in answers)


class Holding:
    """A relay that holds every request until it is let go."""

    def __init__(self) -> None:
        self.go = asyncio.Event()
        self.held = 0
        self.most = 0
        self.came = asyncio.Condition()

    async def __call__(self, asked: Asked, writer: asyncio.StreamWriter) -> None:
        async with self.came:
            self.held += 1
            self.most = max(self.held, self.most)
            self.came.notify_all()
        await self.go.wait()
        self.held -= 1
        body = {"jsonrpc": "2.0", "id": json.loads(asked.body)["id"], "result": {}}
        with suppress(OSError):
            writer.write(json_answer(body))
            await writer.drain()

    async def until(self, count: int) -> None:
        async with asyncio.timeout(BOUND_S), self.came:
            await self.came.wait_for(lambda: self.held >= count)


@pytest.mark.integration
async def test_no_more_is_read_than_may_be_under_way() -> None:
    relay = Holding()
    async with RawServer.running(relay) as server, LineClient.over_bridge(server.url, "t") as client:
        requests = {client.request("ping") for _ in range(3 * MAX_IN_FLIGHT)}
        await relay.until(MAX_IN_FLIGHT)
        relay.go.set()
        assert {(await client.next())["id"] for _ in requests} == requests
    assert relay.most == MAX_IN_FLIGHT


@pytest.mark.integration
async def test_subscriptions_take_no_room_of_calls_and_have_a_bound_of_their_own() -> None:
    relay = Holding()
    async with RawServer.running(relay) as server, LineClient.over_bridge(server.url, "t") as client:
        for _ in range(MAX_SUBSCRIPTIONS):
            client.request("subscriptions/listen", notifications={})
        await relay.until(MAX_SUBSCRIPTIONS)
        refused = client.request("subscriptions/listen", notifications={})
        assert "Too many" in (await client.answer(refused))["error"]["message"]
        call = client.request("ping")
        await relay.until(MAX_SUBSCRIPTIONS + 1)
        relay.go.set()
        answers = {(await client.next())["id"] for _ in range(MAX_SUBSCRIPTIONS + 1)}
        assert call in answers


@ERAS
async def test_a_connection_is_used_again(relay: ServedRelay, hub: Hub, era: str) -> None:
    made: list[str] = []
    begin = Connections.begin

    def counting(connections: Connections, address: str) -> AcceptedConnection | None:
        made.append(address)
        return begin(connections, address)

    with patch.object(Connections, "begin", counting):
        async with LineClient.over_bridge(relay.mcp_url, hub.token()) as client:
            await client.open(era)
            for _ in range(10):
                await client.ask("tools/list", era)
    assert 1 <= len(made) <= 3  # one for what is asked, one for what is followed, and one for the end


# --- taking back


@ERAS
async def test_a_call_that_is_taken_back_is_taken_back_at_the_node(
    relay: ServedRelay, client: LineClient, node: SimulatedNode, era: str
) -> None:
    async with relay.session(node) as end:
        await client.open(era)
        request = client.request("tools/call", era, name=echo_of(node), arguments={"message": "never mind"})
        command = await end.receive("cmd")
        client.say({"method": "notifications/cancelled", "params": {"requestId": request}})
        assert (await end.receive("cmd_cancel")).in_reply_to == command.msg_id
        if era == OLD:
            assert "error" in await client.answer(request)  # as over HTTP
        assert "result" in await client.ask("tools/list", era)


async def test_what_was_never_sent_is_taken_back_without_the_relay() -> None:
    url = mcp_url(f"http://127.0.0.1:{unused_port()}")
    waiting = asyncio.Event()

    async def wait(_seconds: float) -> None:
        waiting.set()
        await asyncio.Event().wait()

    async with LineClient.over_bridge(url, "t", sleep=wait) as client:
        request = client.request("tools/call", OLD, name="a.b.c.d")
        await asyncio.wait_for(waiting.wait(), BOUND_S)
        client.say({"method": "notifications/cancelled", "params": {"requestId": request}})
        client.say({"method": "notifications/cancelled", "params": {"requestId": "no such"}})
        client.say({"method": "notifications/cancelled"})
        client.end()
        await client.until_ended()
        assert client.lines == []
        assert client.log.entries("ended before all requests were answered") == []


# --- changes


async def test_changes_are_told_in_the_old_era(
    relay: ServedRelay, client: LineClient, node: SimulatedNode
) -> None:
    await client.open(OLD)
    asked = 2
    while relay.requests.count("/mcp") == asked:  # until the stream has been asked for, too
        await client.ask("ping", OLD)
        asked += 1
    async with relay.session(node):
        assert await client.next() == {"method": CHANGED, "jsonrpc": "2.0"}


async def test_changes_are_told_in_the_new_era(
    relay: ServedRelay, client: LineClient, node: SimulatedNode
) -> None:
    listen = client.request("subscriptions/listen", notifications={"toolsListChanged": True})
    assert (await client.next())["method"] == "notifications/subscriptions/acknowledged"
    async with relay.session(node):
        changed = await client.next()
        assert changed["method"] == CHANGED
        assert changed["params"]["_meta"]["io.modelcontextprotocol/subscriptionId"] == listen
    client.say({"method": "notifications/cancelled", "params": {"requestId": listen}})
    await relay.until_idle()


# --- a relay that starts anew


@ERAS
async def test_a_relay_that_forgot_everything_is_no_event_for_the_client(
    hub: Hub, server: Server, era: str
) -> None:
    url = mcp_url(f"http://{server.address}")
    async with LineClient.over_bridge(url, hub.token()) as client:
        async with ServedRelay.open(hub, server):
            await client.open(era)
            assert "result" in await client.ask("tools/list", era)
        async with ServedRelay.open(hub, server):
            request = client.request("tools/list", era)
            while (message := await client.next()).get("id") != request:
                assert message["method"] == CHANGED
            assert "result" in message


# --- the end


@ERAS
async def test_the_end_of_the_input_ends_the_session_and_all_that_is_open(
    relay: ServedRelay, hub: Hub, era: str
) -> None:
    async with LineClient.over_bridge(relay.mcp_url, hub.token()) as client:
        await client.open(era)
        if era == NEW:
            client.request("subscriptions/listen", notifications={"toolsListChanged": True})
            await client.next()
    await relay.until_idle()
    assert len(client.lines) == (1 if era == OLD else 2)


async def test_what_is_under_way_when_the_input_ends_is_still_answered(
    relay: ServedRelay, client: LineClient, node: SimulatedNode
) -> None:
    async with relay.session(node) as end:
        request = client.request("tools/call", name=echo_of(node), arguments={"message": "last words"})
        client.end()
        command = await end.receive("cmd")
        await end.acknowledge(command, echoed(node, "last words"))
        assert (await client.answer(request))["result"]["isError"] is False
        await client.until_ended()


async def asking(method: str) -> AsyncIterator[bytes]:
    """Yield one request, on an input that does not end."""
    yield _message(1, method, {"_meta": META}) + b"\n"
    await asyncio.Event().wait()


@pytest.mark.integration
async def test_who_is_told_to_stop_does_not_wait_for_a_relay_that_does_not_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("relay.client.stdio_bridge.bridge.STOP_TIMEOUT_S", 0.01)
    assert DRAIN_TIMEOUT_S > 0.01
    relay, log = Holding(), LogLines()
    async with RawServer.running(relay) as server:
        http = RelayHttp(server.url, RenewableToken("t"), client_context())
        lines: list[bytes] = []

        async def take(line: bytes) -> None:
            lines.append(line)

        bridge = Bridge(Conversation(http), take, make_logger("relay", log))
        running = asyncio.create_task(bridge.run(asking("ping")))
        await relay.until(1)
        bridge.stop()
        await asyncio.wait_for(running, BOUND_S)
        await http.close()
        relay.go.set()
    assert lines == []
    assert log.entries("ended before all requests were answered")[0]["messages"] == 1


async def test_a_client_that_reads_no_more_ends_the_bridge(relay: ServedRelay, hub: Hub) -> None:
    http, log = RelayHttp(relay.mcp_url, RenewableToken(hub.token()), client_context()), LogLines()

    async def broken(_line: bytes) -> None:
        raise BrokenPipeError

    bridge = Bridge(Conversation(http), broken, make_logger("relay", log))
    await asyncio.wait_for(bridge.run(asking("server/discover")), BOUND_S)
    await http.close()
    assert log.entries("the output is closed")


async def test_a_bug_is_an_answer_and_a_line_in_the_log(
    client: LineClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    def bug(*_: object) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr("relay.client.stdio_bridge.delivery.Conversation.sent", bug)
    answer = await client.ask("tools/list")
    assert answer["error"]["code"] == -32603
    assert "a bug" not in json.dumps(answer)
    assert "a bug" in client.log.entries("delivery failed")[0]["exception"]


# --- the command


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-P", "-m", "relay", "stdio", *arguments]


def run(*arguments: str, token: str | None = None, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    environment = {name: value for name, value in os.environ.items() if name != "EDGE_TOKEN"}
    if token is not None:
        environment["EDGE_TOKEN"] = token
    return subprocess.run(
        command(*arguments), input=stdin, capture_output=True, check=False, timeout=60, env=environment
    )


@pytest.mark.integration
async def test_the_command_serves_a_client_and_ends_with_its_input(
    relay: ServedRelay, hub: Hub, tmp_path: Path
) -> None:
    file = tmp_path / "token"
    keep_token(file, hub.token())
    stdin = _message(1, "tools/list", {"_meta": META}) + b"\nnonsense\n"
    done = await asyncio.to_thread(
        run, "--url", f"http://{relay.address}", "--token-file", str(file), stdin=stdin
    )
    assert done.returncode == 0, done.stderr
    answers = {answer["id"]: answer for answer in map(json.loads, done.stdout.splitlines())}
    assert answers[1]["result"]["tools"] == []
    assert answers[None]["error"]["code"] == -32700
    assert done.stderr == b""


@pytest.mark.integration
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
async def test_a_signal_ends_the_command_as_the_end_of_its_input_does(
    relay: ServedRelay, hub: Hub, number: signal.Signals
) -> None:
    process = await asyncio.create_subprocess_exec(
        *command("--url", f"http://{relay.address}"),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "EDGE_TOKEN": hub.token()},
    )
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(_message(1, "initialize", OPENING) + b"\n")
    async with asyncio.timeout(BOUND_S):
        assert json.loads(await process.stdout.readline())["id"] == 1
        process.send_signal(number)
        assert await process.wait() == 0
        assert await process.stdout.read() == b""
    process.stdin.close()
    await relay.until_idle()
    assert relay.requests.count("/mcp") == 2  # the second one ends the session


@pytest.mark.integration
@pytest.mark.parametrize(
    ("arguments", "token", "status", "said"),
    [
        (["--url", "http://relay.example"], "t", 2, "is not encrypted"),
        (["--url", "https://relay.example/other"], "t", 2, "is not the URL of a relay"),
        (["--url", "https://relay.example"], None, 2, "--token-file, or in EDGE_TOKEN"),
        (["--url", "https://relay.example", "--token-file", "EMPTY"], None, 3, "holds no token"),
        (["--url", "https://relay.example", "--token-file", "EXPOSED"], None, 3, "chmod 600"),
        (["--url", "https://relay.example", "--token-file", "/no/such"], None, 3, "/no/such"),
        (["--url", "https://relay.example", "--root", "EMPTY"], "t", 3, "no certificate"),
        (["--url", "https://relay.example", "--names", "other"], "t", 2, "dotted"),
    ],
)
async def test_what_cannot_work_is_said_in_one_line_and_not_on_the_output(
    tmp_path: Path, arguments: list[str], token: str | None, status: int, said: str
) -> None:
    for name, mode in (("EMPTY", 0o600), ("EXPOSED", 0o644)):
        (tmp_path / name).touch(mode=mode)
        (tmp_path / name).chmod(mode)
    arguments = [str(tmp_path / word) if word in {"EMPTY", "EXPOSED"} else word for word in arguments]
    done = await asyncio.to_thread(run, *arguments, token=token)
    assert (done.returncode, done.stdout) == (status, b"")
    assert said in done.stderr.decode()
