import asyncio
import time
from collections.abc import AsyncIterator, Iterable
from itertools import pairwise
from pathlib import Path

import httpx2
import pytest
from hypothesis import given
from hypothesis import strategies as st

from relay.client.credentials import RenewableToken
from relay.client.stdio_bridge.http_client import (
    MAX_ANSWER_BYTES,
    LostError,
    RelayHttp,
    RelayResponse,
)
from schemas.tls import client_context
from tests.fakes.raw_http_server import Asked, RawServer, http_answer, json_answer, server_context
from tests.fakes.signer import SimulatedCa

STREAM = {"Content-Type": "text/event-stream; charset=utf-8"}
PONG = b'{"jsonrpc":"2.0","id":1,"result":{}}'


async def asked(url: str, token: RenewableToken | None = None) -> tuple[int, list[bytes]]:
    http = RelayHttp(url, token or RenewableToken("t"), client_context())
    try:
        async with http.exchange("POST", {"mcp-method": "ping"}, b'{ "id" : 1 }') as answer:
            return answer.status, [raw async for raw, _ in answer.messages()]
    finally:
        await http.close()


# --- requests


@pytest.mark.integration
async def test_the_bytes_go_as_they_are_with_the_token_and_what_a_stream_needs() -> None:
    async with RawServer.running(json_answer(PONG)) as server:
        assert await asked(server.url + "/mcp?names=dashed", RenewableToken("the-token")) == (200, [PONG])
    [request] = server.asked
    head = request.head.lower().split("\r\n")
    assert head[0] == "post /mcp?names=dashed http/1.1"
    assert {
        "authorization: bearer the-token",
        "accept: application/json, text/event-stream",
        "accept-encoding: identity",
        "content-type: application/json",
        "edge-transport: stdio",
        "mcp-method: ping",
    } <= set(head)
    assert request.body == b'{ "id" : 1 }'


@pytest.mark.integration
async def test_a_relay_is_believed_by_the_root_that_was_named(tmp_path: Path) -> None:
    now_ms = time.time_ns() // 1_000_000
    ca = SimulatedCa(now_ms=now_ms)
    context = server_context(ca, tmp_path, now_ms)
    async with RawServer.running(json_answer(PONG), context) as server:
        http = RelayHttp(server.url, RenewableToken("t"), client_context(ca.root_pem))
        async with http.exchange("POST", {}, b"{}") as answer:
            assert [raw async for raw, _ in answer.messages()] == [PONG]
        await http.close()


@pytest.mark.integration
@pytest.mark.parametrize(
    "answer",
    [b"", b"HTTP/1.1 200 OK\r\nContent-Le", b"nonsense\r\n\r\n", json_answer(PONG)[:-3]],
    ids=["nothing", "half-a-head", "no-http", "half-a-body"],
)
async def test_what_broke_off_may_have_arrived(answer: bytes) -> None:
    async with RawServer.running(answer) as server:
        with pytest.raises(LostError):
            await asked(server.url)


@pytest.mark.integration
async def test_a_redirect_is_not_followed() -> None:
    async with RawServer.running(http_answer(307, b"", Location="/elsewhere")) as server:
        assert await asked(server.url) == (307, [])
        assert len(server.asked) == 1


# --- answers


@pytest.mark.integration
@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (PONG, [PONG]),
        (b'\r\n{"jsonrpc": "2.0",\r\n "id": 1}\n', [b'{"jsonrpc": "2.0",   "id": 1}']),
        (b"<html>", []),
        (b'{"error":"token"}', []),
        (b'[{"jsonrpc":"2.0"}]', []),
        (b'{"jsonrpc":"2.0","x":NaN}', []),
        (b"", []),
    ],
    ids=["as-it-is", "on-one-line", "a-page", "no-message", "a-batch", "no-json", "nothing"],
)
async def test_only_messages_come_out_of_an_answer(body: bytes, expected: list[bytes]) -> None:
    async with RawServer.running(json_answer(body)) as server:
        assert await asked(server.url) == (200, expected)


@pytest.mark.integration
async def test_each_message_of_a_stream_comes_while_the_stream_is_open() -> None:
    more = asyncio.Event()

    async def respond(_asked: Asked, writer: asyncio.StreamWriter) -> None:
        writer.write(http_answer(200, b"x" * 200, **STREAM)[:-200])
        writer.write(b": ping\r\n\r\nevent: message\r\ndata: " + PONG + b"\r\n\r\n")
        await writer.drain()
        await more.wait()

    async with RawServer.running(respond) as server:
        http = RelayHttp(server.url, RenewableToken("t"), client_context())
        async with http.exchange("GET", {}) as answer:
            assert answer.is_stream
            messages = answer.messages()
            assert (await anext(messages))[0] == PONG
            more.set()
            with pytest.raises(LostError):
                await anext(messages)
        await http.close()
    assert "accept: text/event-stream\r\n" in server.asked[0].head.lower()


@pytest.mark.integration
@pytest.mark.parametrize("kind", [{}, STREAM], ids=["json", "stream"])
async def test_an_answer_without_end_is_given_up(
    kind: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("relay.client.stdio_bridge.http_client.MAX_ANSWER_BYTES", 100_000)
    assert MAX_ANSWER_BYTES > 100_000
    async with RawServer.running(json_answer(b"data: " + b"x" * 200_000, **kind)) as server:
        with pytest.raises(LostError, match="too large"):
            await asked(server.url)


async def refusal(answer: bytes) -> tuple[bool, str]:
    async with RawServer.running(answer) as server:
        http = RelayHttp(server.url, RenewableToken("t"), client_context())
        async with http.exchange("POST", {}, b"{}") as got:
            found = await got.read_refusal()
            # What was read to see what it is can still be passed on.
            assert found[0] is bool([raw async for raw, _ in got.messages()])
        await http.close()
    return found


@pytest.mark.integration
async def test_a_refusal_is_a_message_or_has_a_reason_that_can_be_shown() -> None:
    rpc = b'{"jsonrpc":"2.0","id":null,"error":{"code":-32700,"message":"no"}}'
    assert (await refusal(json_answer(rpc, 400)))[0] is True
    own = b'{"error":"token","message":"Expired\\u001b[31m."}'
    assert await refusal(json_answer(own, 401)) == (False, "Expired\\x1b[31m.")
    assert await refusal(http_answer(502, b"<html>")) == (False, "status 502")


# --- events


EVENTS = [b"one", b"two\nlines", b"\xc3\xb6", b"\xff\xe2\x80\xa8\x85", b"x" * 50]


async def events_of(chunks: Iterable[bytes]) -> list[bytes]:
    async def arriving() -> AsyncIterator[bytes]:
        for chunk in chunks:
            yield chunk

    # Whatever the relay says of its form: what is not UTF-8 is no message, and is not made one.
    headers = {"content-type": "text/event-stream; charset=utf-16", "content-encoding": "gzip"}
    request = httpx2.Request("GET", "http://127.0.0.1/mcp")
    answer = RelayResponse(httpx2.Response(200, headers=headers, content=arriving(), request=request))
    return [event async for event in answer.documents()]


@given(st.sampled_from([b"\n", b"\r\n", b"\r"]), st.lists(st.integers(0, 200), max_size=8))
def test_however_a_stream_is_cut_its_events_are_the_same_bytes(end: bytes, places: list[int]) -> None:
    stream = b"".join(
        b": comment" + end + b"".join(b"data: " + line + end for line in event.split(b"\n")) + end
        for event in EVENTS
    )
    edges = sorted({0, *(place % len(stream) for place in places), len(stream)})
    found = asyncio.run(events_of(stream[start:stop] for start, stop in pairwise(edges)))
    # A carriage return at the very end may be half of an end of a line.
    assert found == (EVENTS if end != b"\r" else EVENTS[: len(found)])
    assert len(found) >= len(EVENTS) - 1


async def test_an_event_of_many_lines_has_an_end_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("relay.client.stdio_bridge.http_client.MAX_ANSWER_BYTES", 500)
    assert await events_of([b"data: 0123456789\n"] * 50) == []
    with pytest.raises(LostError, match="too large"):
        await events_of([b"data: 0123456789\n"] * 100)
