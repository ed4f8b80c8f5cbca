import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from relay.client.stdio_bridge.delivery import LONGEST_DELAY_S, REFUSED_DELAY_S, RETRY_TIMEOUT_S, RetryDelays
from tests.fakes.bridged import OLD, LineClient
from tests.fakes.pauses import Pauses
from tests.fakes.ports import unused_port
from tests.fakes.raw_http_server import Asked, RawServer, http_answer, json_answer, server_context
from tests.fakes.seconds import Seconds
from tests.fakes.signer import NOW_MS, SimulatedCa

pytestmark = pytest.mark.integration

CALL: dict[str, Any] = {"name": "sysecho.x.echo.invoke", "arguments": {}}
CHANGED = "notifications/tools/list_changed"
STREAM = {"Content-Type": "text/event-stream"}


def result(asked: Asked, **members: Any) -> bytes:
    own_id = json.loads(asked.body).get("id")
    return json_answer({"jsonrpc": "2.0", "id": own_id, "result": {"ok": True}} | members)


def stream(*messages: dict[str, Any]) -> bytes:
    """Return the beginning of a stream that never ends well."""
    head = http_answer(200, b"x" * 100_000, **STREAM)[:-100_000]
    return head + b"".join(b"data: " + json.dumps(message).encode() + b"\r\n\r\n" for message in messages)


Step = Callable[[Asked], bytes]


@asynccontextmanager
async def scripted(*steps: Step, **options: Any) -> AsyncIterator[tuple[RawServer, LineClient]]:
    """Hold a client of a relay that answers the requests in turn; the last step is for all that follow."""
    left = list(steps)

    async def respond(asked: Asked, writer: asyncio.StreamWriter) -> None:
        step = left.pop(0) if len(left) > 1 else left[0]
        writer.write(step(asked))
        await writer.drain()

    async with (
        RawServer.running(respond) as server,
        LineClient.over_bridge(server.url, "t", **options) as client,
    ):
        yield server, client


async def at_once(_seconds: float) -> None:
    await asyncio.sleep(0)


def hang_up(_asked: Asked) -> bytes:
    return b""


def unavailable(_asked: Asked) -> bytes:
    return http_answer(503, b"")


# --- a relay that is away


@pytest.mark.parametrize("method", ["tools/call", "tools/list"])
async def test_what_was_never_sent_is_sent_again_until_it_is_taken(method: str) -> None:
    async with scripted(unavailable, unavailable, unavailable, result, sleep=at_once) as (server, client):
        assert (await client.ask(method, **CALL))["result"] == {"ok": True}
        assert len(server.asked) == 4
        assert len({asked.body for asked in server.asked}) == 1
        assert len(client.log.entries("the relay is not reached")) == 1
        assert len(client.log.entries("the relay is reached again")) == 1


async def test_a_relay_that_does_not_come_back_is_waited_for_so_long_and_no_longer() -> None:
    clock, pauses = Seconds(), Pauses()
    url = f"http://127.0.0.1:{unused_port()}"
    async with LineClient.over_bridge(url, "t", sleep=pauses.sleep, monotonic=clock) as client:
        request = client.request("tools/call", **CALL)
        first = await pauses.next()
        clock.now += RETRY_TIMEOUT_S - 1
        first.end()
        second = await pauses.next()
        clock.now += 1
        second.end()
        error = (await client.answer(request))["error"]
        assert error["code"] == -32603
        assert "nothing was sent" in error["message"]
        assert error["data"] == {
            "canonical": "INTERNAL_ERROR",
            "httpStatus": 500,
            "message": error["message"],
            "retryable": True,
        }


async def test_a_relay_that_is_not_trusted_is_reported_at_once_with_the_option_that_names_its_root(
    tmp_path: Path,
) -> None:
    context = server_context(SimulatedCa(), tmp_path, NOW_MS)
    async with (
        RawServer.running(lambda _asked, _writer: asyncio.sleep(0), context) as server,
        LineClient.over_bridge(server.url, "t") as client,
    ):
        error = (await client.ask("tools/call", **CALL))["error"]
        assert "certificate is not trusted" in error["message"]
        assert "--root" in error["message"]
        assert error["data"]["retryable"] is False
        [line] = client.log.entries("the relay is not reached")
        assert "--root" in line["reason"]


async def test_a_call_that_may_have_run_is_not_sent_again() -> None:
    async with scripted(hang_up, result, sleep=at_once) as (server, client):
        error = (await client.ask("tools/call", **CALL))["error"]
        assert (error["code"], error["data"]["canonical"]) == (-32603, "INTERNAL_ERROR")
        assert error["data"]["retryable"] is False
        assert "may have run" in error["message"]
        assert len(server.asked) == 1


@pytest.mark.parametrize("method", ["tools/list", "ping", "resources/read", "server/discover"])
@pytest.mark.parametrize(
    "failure",
    [hang_up, lambda _asked: http_answer(502, b""), lambda _asked: stream()],
    ids=["hangs-up", "gateway", "half-a-stream"],
)
async def test_what_may_be_asked_twice_is_asked_again(method: str, failure: Step) -> None:
    async with scripted(failure, result, sleep=at_once) as (server, client):
        assert (await client.ask(method, uri="fleet://nodes"))["result"] == {"ok": True}
        assert len(server.asked) == 2


async def test_what_was_answered_stays_answered_though_the_stream_breaks_then() -> None:
    def answered(asked: Asked) -> bytes:
        note = {"jsonrpc": "2.0", "method": "notifications/progress", "params": {}}
        return stream(note, {"jsonrpc": "2.0", "id": json.loads(asked.body)["id"], "result": {}})

    async with scripted(answered) as (server, client):
        request = client.request("tools/call", **CALL)
        assert (await client.next())["method"] == "notifications/progress"
        assert (await client.answer(request))["result"] == {}
        client.end()
        await client.until_ended()
        assert len(client.lines) == 2
        assert len(server.asked) == 1


# --- answers


async def test_an_answer_comes_out_byte_for_byte() -> None:
    body = b'{"result":{"z":1.0,"a":"\\u00f6 \xc3\xb6"}, "id":1,"jsonrpc":"2.0"}'
    async with scripted(lambda _asked: json_answer(body)) as (_, client):
        await client.ask("ping")
        assert client.lines == [body]


async def test_an_error_without_an_id_gets_that_of_the_request_that_it_is_for() -> None:
    body = b'{"jsonrpc":"2.0","id":null,"error":{"code":-32600,"message":"No session."}}'
    async with scripted(lambda _asked: json_answer(body, 400)) as (_, client):
        answer = await client.ask("ping")
        assert answer["error"] == {"code": -32600, "message": "No session."}
        # What has no id of its own is answered as the relay does.
        client.write(b"nonsense\n")
        assert (await client.next())["id"] is None
        assert client.lines[-1] == body


async def test_an_answer_to_something_else_is_no_answer() -> None:
    body = b'{"jsonrpc":"2.0","id":"another","result":{}}'
    async with scripted(lambda _asked: json_answer(body)) as (_, client):
        request = client.request("tools/call", **CALL)
        assert (await client.next())["id"] == "another"
        assert "error" in await client.answer(request)


async def test_what_is_no_answer_becomes_an_error() -> None:
    async with scripted(lambda _asked: http_answer(202, b"")) as (_, client):
        assert (await client.ask("tools/call", **CALL))["error"]["code"] == -32603


async def test_a_notification_has_no_answer_whatever_the_relay_says() -> None:
    body = b'{"jsonrpc":"2.0","id":null,"error":{"code":-32600,"message":"No."}}'
    refusals = [lambda _asked: json_answer(body, 400), lambda _asked: http_answer(403, b"")]
    async with scripted(*refusals, result) as (_, client):
        client.say({"method": "notifications/one\x1b[31m"})
        client.say({"id": 7, "result": {}})
        for event in (1, 2):
            await client.log.until("not delivered", event)
        assert "\x1b" not in client.log.getvalue()
        await client.ask("ping")
        assert len(client.lines) == 1


async def test_a_refused_token_is_said_to_each_request() -> None:
    body = b'{"error":"token","message":"The token has been revoked."}'
    async with scripted(lambda _asked: json_answer(body, 401)) as (_, client):
        error = (await client.ask("tools/call", **CALL))["error"]
        assert (error["code"], error["data"]["canonical"]) == (-32001, "UNAUTHORIZED")
        assert "The token has been revoked." in error["message"]
        assert "EDGE_TOKEN" in error["message"]


# --- what the relay says without being asked


def acknowledged(asked: Asked) -> bytes:
    own_id = json.loads(asked.body)["id"]
    meta = {"io.modelcontextprotocol/subscriptionId": own_id}
    return stream(
        {
            "jsonrpc": "2.0",
            "method": "notifications/subscriptions/acknowledged",
            "params": {"_meta": meta, "notifications": {"toolsListChanged": True}},
        }
    )


async def test_a_subscription_whose_stream_breaks_is_taken_up_again_and_the_gap_counts_as_a_change() -> None:
    pauses = Pauses()
    steps = [acknowledged, hang_up, unavailable, acknowledged]
    async with scripted(*steps, sleep=pauses.sleep, monotonic=Seconds()) as (server, client):
        request = client.request("subscriptions/listen", notifications={"toolsListChanged": True})
        assert (await client.next())["method"] == "notifications/subscriptions/acknowledged"
        for _ in range(3):
            (await pauses.next()).end()
        changed = await client.next()
        assert changed["method"] == CHANGED
        assert changed["params"]["_meta"] == {"io.modelcontextprotocol/subscriptionId": request}
        await pauses.next()
        assert len({asked.body for asked in server.asked}) == 1
        assert len(client.lines) == 2


async def test_a_subscription_that_stood_once_is_kept_up_for_longer_than_a_call() -> None:
    clock, pauses = Seconds(), Pauses()
    steps = [acknowledged, unavailable, acknowledged]
    async with scripted(*steps, sleep=pauses.sleep, monotonic=clock) as (_, client):
        client.request("subscriptions/listen", notifications={"toolsListChanged": True})
        assert (await client.next())["method"] == "notifications/subscriptions/acknowledged"
        for _ in range(2):
            pause = await pauses.next()
            clock.now += 10 * RETRY_TIMEOUT_S
            pause.end()
        assert (await client.next())["method"] == CHANGED


@asynccontextmanager
async def following(
    streams: list[bytes], pauses: Pauses, opened: list[str]
) -> AsyncIterator[tuple[RawServer, LineClient]]:
    """Hold a client of the old era, of a relay whose GET streams are ``streams``, in turn."""

    async def respond(asked: Asked, writer: asyncio.StreamWriter) -> None:
        if asked.method == "GET":
            writer.write(streams.pop(0) if len(streams) > 1 else streams[0])
        elif b'"initialize"' in asked.body:
            opened.append("session")
            reply = result(asked, result={"protocolVersion": OLD})
            writer.write(reply.replace(b"\r\n", b"\r\nMcp-Session-Id: %d\r\n" % len(opened), 1))
        else:
            writer.write(http_answer(202, b""))
        await writer.drain()

    options: dict[str, Any] = {"sleep": pauses.sleep, "monotonic": Seconds()}
    async with (
        RawServer.running(respond) as server,
        LineClient.over_bridge(server.url, "t", **options) as client,
    ):
        await client.open(OLD)
        yield server, client


async def test_the_stream_of_a_session_is_taken_up_again_and_the_gap_counts_as_a_change() -> None:
    pauses, opened = Pauses(), list[str]()
    note = {"jsonrpc": "2.0", "method": "notifications/message", "params": {"data": 1}}
    async with following([stream(note), unavailable(Asked("", b"")), stream()], pauses, opened) as (
        _,
        client,
    ):
        assert (await client.next()) == note
        for _ in range(2):
            (await pauses.next()).end()
        assert await client.next() == {"jsonrpc": "2.0", "method": CHANGED}
        assert len(opened) == 1


async def test_a_stream_whose_session_is_gone_opens_another() -> None:
    pauses, opened = Pauses(), list[str]()
    async with following([http_answer(404, b""), stream()], pauses, opened) as (server, client):
        (await pauses.next()).end()
        assert (await client.next())["method"] == CHANGED
        assert len(opened) == 2
        gets = [asked.head.lower() for asked in server.asked if asked.method == "GET"]
        assert ["mcp-session-id: 1" in gets[0], "mcp-session-id: 2" in gets[1]] == [True, True]
        assert f"mcp-protocol-version: {OLD}" in gets[0]


@pytest.mark.parametrize(("version", "session"), [(OLD, b"\xc3\xa9"), ("\xe9", b"1"), ("a\r\nb: c", b"1")])
async def test_a_session_that_no_header_can_hold_ends_nothing(version: str, session: bytes) -> None:
    def respond(asked: Asked) -> bytes:
        if b'"id"' not in asked.body:
            return http_answer(202 if asked.body else 405, b"")
        reply = result(asked, result={"protocolVersion": version})
        return reply.replace(b"\r\n", b"\r\nMcp-Session-Id: %s\r\n" % session, 1)

    async with scripted(respond) as (_, client):
        await client.open(OLD)
        await client.log.until("no stream of changes", 1)
        assert "result" in await client.ask("ping", OLD)


class Restarted:
    """A relay that has lost its first session, and is asked to follow too fast in the second."""

    def __init__(self) -> None:
        self.opened = 0
        self.in_second: list[dict[str, Any]] = []

    async def __call__(self, asked: Asked, writer: asyncio.StreamWriter) -> None:
        message = json.loads(asked.body or "{}")
        if asked.method != "POST":
            reply = http_answer(405, b"")
        elif "mcp-session-id: 2" in asked.head.lower():
            reply = self._second(asked, message)
        elif message["method"] == "ping":
            reply = http_answer(404, b"")
        elif message["method"] == "initialize":
            self.opened += 1
            reply = result(asked, result={"protocolVersion": OLD})
            reply = reply.replace(b"\r\n", b"\r\nMcp-Session-Id: %d\r\n" % self.opened, 1)
        elif message.get("params") == {"uri": "fleet://nodes"}:
            reply = json_answer({"jsonrpc": "2.0", "id": message["id"], "error": {}})
        else:
            reply = result(asked) if "id" in message else http_answer(202, b"")
        writer.write(reply)
        await writer.drain()

    def _second(self, asked: Asked, message: dict[str, Any]) -> bytes:
        self.in_second.append(message)
        if message["method"] == "resources/subscribe" and self.in_second.count(message) == 1:
            return http_answer(429, b"", **{"Retry-After": "1"})
        return result(asked) if "id" in message else http_answer(202, b"")


async def test_a_new_session_remembers_what_the_lost_one_did_and_its_client_hears_nothing_of_that() -> None:
    relay, pauses = Restarted(), Pauses()
    async with (
        RawServer.running(relay) as server,
        LineClient.over_bridge(server.url, "t", sleep=pauses.sleep) as client,
    ):
        await client.open(OLD)
        for level in ("error", "info"):
            await client.ask("logging/setLevel", OLD, level=level)
        for uri in ("node://a/telemetry", "node://b/telemetry", "fleet://nodes"):
            await client.ask("resources/subscribe", OLD, uri=uri)
        await client.ask("resources/unsubscribe", OLD, uri="node://a/telemetry")
        ping = client.request("ping", OLD)
        while (pause := await pauses.next()).seconds == REFUSED_DELAY_S:
            pass  # of the stream
        pause.end()
        await client.answer(ping)
    followed = ("resources/subscribe", {"uri": "node://b/telemetry"})
    assert [(message["method"], message.get("params")) for message in relay.in_second] == [
        ("notifications/initialized", None),
        ("logging/setLevel", {"level": "info"}),
        followed,
        followed,
        ("ping", {}),
    ]
    assert relay.opened == 2


async def test_a_stream_that_the_relay_will_not_give_is_seldom_asked_for() -> None:
    pauses = Pauses()
    async with following([http_answer(405, b"")], pauses, []) as (_, client):
        assert (await pauses.next()).seconds == REFUSED_DELAY_S
        assert client.log.entries("no stream of changes")


# --- waits


def test_waits_grow_to_a_bound_and_begin_anew_after_a_good_while() -> None:
    clock = Seconds()
    waits = RetryDelays(clock, lambda: 1.0)
    grown = [waits.next() for _ in range(10)]
    assert grown[:3] == [0.1, 0.2, 0.4]
    assert grown[-1] == LONGEST_DELAY_S
    clock.now += 1000
    assert waits.next() == 0.1
