import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from relay.client.credentials import RenewableToken, keep_token
from relay.client.stdio_bridge.delivery import Conversation, RefusedError, SessionGoneError
from relay.client.stdio_bridge.http_client import LostError, NotSentError, RelayHttp
from relay.client.stdio_bridge.messages import Message, read
from schemas.addresses import mcp_url
from schemas.tls import client_context
from tests.fakes.bridged import ME, META, NEW, OLD
from tests.fakes.hub import Hub
from tests.fakes.raw_http_server import Asked, RawServer, http_answer, json_answer
from tests.fakes.served_relay import ServedRelay
from tests.fakes.serving import Server

pytestmark = pytest.mark.asyncio(loop_scope="module")

OPENING: dict[str, Any] = {"protocolVersion": OLD, "capabilities": {}, "clientInfo": ME}
EMPTY = {"jsonrpc": "2.0", "id": 1, "result": {}}
BOUND_S = 30


def said(method: str, number: int | None = 1, **params: Any) -> Message:
    own_id = {} if number is None else {"id": number}
    return read(json.dumps({"jsonrpc": "2.0", **own_id, "method": method, "params": params}).encode())


@asynccontextmanager
async def conversation(url: str, token: RenewableToken | str) -> AsyncIterator[Conversation]:
    http = RelayHttp(
        url, token if isinstance(token, RenewableToken) else RenewableToken(token), client_context()
    )
    try:
        yield Conversation(http)
    finally:
        await http.close()


async def answers_to(talk: Conversation, message: Message) -> list[dict[str, Any]]:
    async with talk.sent(message) as answer:
        values = [value async for _, value in answer.messages()]
        for value in values:
            if "result" in value:
                talk.take(message, answer, value["result"])
    return values


async def opened(talk: Conversation) -> None:
    await answers_to(talk, said("initialize", **OPENING))
    await answers_to(talk, said("notifications/initialized", None))


async def test_what_says_its_era_needs_no_session(relay: ServedRelay, hub: Hub) -> None:
    async with conversation(relay.mcp_url, hub.token()) as talk:
        [answer] = await answers_to(talk, said("tools/list", _meta=META))
        assert answer["result"]["tools"] == []
        # What does not say it goes as the client's other messages do.
        assert await answers_to(talk, said("notifications/roots/list_changed", None)) == []
        assert talk.session is None


async def test_a_session_is_kept_and_ended(relay: ServedRelay, hub: Hub) -> None:
    async with conversation(relay.mcp_url, hub.token()) as talk:
        await opened(talk)
        session = talk.session
        assert session is not None
        assert session.version == OLD
        assert talk.follows.is_set()
        assert (await answers_to(talk, said("ping")))[0]["result"] == {}
        await talk.close()
        with pytest.raises(SessionGoneError):
            async with talk.stream(session):
                pass


async def test_a_session_that_the_relay_forgot_is_opened_again_with_the_client_s_words(
    hub: Hub, server: Server
) -> None:
    async with conversation(mcp_url(f"http://{server.address}"), hub.token()) as talk:
        async with ServedRelay.open(hub, server):
            await opened(talk)
            first = talk.session
        async with ServedRelay.open(hub, server):
            [answer] = await answers_to(talk, said("ping", 7))
            assert (answer["id"], answer["result"]) == (7, {})
            assert first is not None
            assert talk.session is not None
            assert talk.session.id != first.id
            async with talk.stream(talk.session) as stream:
                assert stream.is_stream


class Forgetful:
    """A relay that has forgotten session ``1``, and notices it when ``askers`` have asked for it."""

    def __init__(self, askers: int) -> None:
        self._askers = askers
        self._all_there = asyncio.Event()
        self.opened = 0

    async def __call__(self, asked: Asked, writer: asyncio.StreamWriter) -> None:
        message = json.loads(asked.body)
        answer = {"jsonrpc": "2.0", "id": message.get("id"), "result": {"protocolVersion": OLD}}
        headers, status = dict[str, str](), 200
        if message["method"] == "initialize":
            self.opened += 1
            headers["Mcp-Session-Id"] = str(self.opened)
        elif message["method"] == "ping" and "mcp-session-id: 1\r\n" in asked.head.lower():
            self._askers -= 1
            if not self._askers:
                self._all_there.set()
            await self._all_there.wait()
            status = 404
        writer.write(json_answer(answer, status, **headers))
        await writer.drain()


@pytest.mark.integration
async def test_however_many_miss_the_session_one_is_opened_for_all() -> None:
    relay = Forgetful(5)
    async with RawServer.running(relay) as server, conversation(server.url, "t") as talk:
        await opened(talk)
        answers = await asyncio.gather(*(answers_to(talk, said("ping", number)) for number in range(5)))
        assert [answer["id"] for [answer] in answers] == list(range(5))
        assert relay.opened == 2
        words = [asked.body for asked in server.asked if b"initialize" in asked.body]
        assert words[:2] == words[2:]


@pytest.mark.integration
async def test_a_relay_that_forgets_each_session_at_once_is_not_asked_again_and_again() -> None:
    async def respond(asked: Asked, writer: asyncio.StreamWriter) -> None:
        opens = b'"initialize"' in asked.body
        status = 200 if opens or b"initialized" in asked.body else 404
        writer.write(json_answer(EMPTY, status, **({"Mcp-Session-Id": "x"} if opens else {})))
        await writer.drain()

    async with RawServer.running(respond) as server, conversation(server.url, "t") as talk:
        await opened(talk)
        with pytest.raises(NotSentError, match="loses each session"):
            await answers_to(talk, said("ping"))
        assert len(server.asked) < 20


@pytest.mark.integration
async def test_while_no_session_can_be_opened_again_nothing_was_sent() -> None:
    async def respond(asked: Asked, writer: asyncio.StreamWriter) -> None:
        if b'"initialize"' in asked.body and len(server.asked) > 1:
            return  # it hangs up
        status = 404 if b"tools/call" in asked.body else 200
        writer.write(json_answer(EMPTY, status, **{"Mcp-Session-Id": "x"}))
        await writer.drain()

    async with RawServer.running(respond) as server, conversation(server.url, "t") as talk:
        await opened(talk)
        # The call itself was refused for certain, whatever became of the opening.
        with pytest.raises(NotSentError):
            await answers_to(talk, said("tools/call", name="a.b.c.d"))


@pytest.mark.integration
@pytest.mark.parametrize("endless", [b'"initialize"', b'"notifications/initialized"'])
async def test_an_answer_that_never_ends_does_not_hold_up_a_new_session_for_good(
    monkeypatch: pytest.MonkeyPatch, endless: bytes
) -> None:
    monkeypatch.setattr("relay.client.stdio_bridge.delivery.ANSWERED_WITHIN_S", 0.2, raising=False)
    over = asyncio.Event()

    async def respond(asked: Asked, writer: asyncio.StreamWriter) -> None:
        is_lost = any(b'"ping"' in each.body for each in server.asked)
        if is_lost and endless in asked.body:
            writer.write(http_answer(200, b"x", **{"Content-Type": "text/event-stream"})[:-1])
            await over.wait()
        status = 404 if b'"ping"' in asked.body else 200
        writer.write(json_answer(EMPTY, status, **{"Mcp-Session-Id": "x"}))
        await writer.drain()

    async with RawServer.running(respond) as server, conversation(server.url, "t") as talk:
        await opened(talk)
        async with asyncio.timeout(BOUND_S):
            for number in range(2):
                with pytest.raises(NotSentError, match="in time"):
                    await answers_to(talk, said("ping", number))
        over.set()


async def test_without_a_session_not_found_is_an_answer(relay: ServedRelay, hub: Hub) -> None:
    async with conversation(relay.mcp_url, hub.token()) as talk:
        [answer] = await answers_to(talk, said("no/such/method", 3, _meta=META))
        assert (answer["id"], answer["error"]["code"]) == (3, -32601)


# --- the token


@pytest.mark.parametrize("era", [OLD, NEW])
async def test_a_token_that_was_renewed_is_used_without_a_word(
    relay: ServedRelay, hub: Hub, tmp_path: Path, era: str
) -> None:
    file = tmp_path / "token"
    keep_token(file, hub.token(ttl_s=60))
    meta: dict[str, Any] = {"_meta": META} if era == NEW else {}
    async with conversation(relay.mcp_url, RenewableToken.find(file, {})) as talk:
        if era == OLD:
            await opened(talk)
        session = talk.session
        hub.clock.advance(120_000)
        with pytest.raises(RefusedError, match=r"has expired\. .*--token-file") as caught:
            await answers_to(talk, said("tools/list", **meta))
        assert caught.value.code == "UNAUTHORIZED"
        file.write_text(hub.token())
        assert (await answers_to(talk, said("tools/list", **meta)))[0]["result"]["tools"] == []
        assert talk.session is session


async def test_no_token_is_ever_said_again(relay: ServedRelay) -> None:
    async with conversation(relay.mcp_url, "not-a-token") as talk:
        with pytest.raises(RefusedError) as caught:
            await answers_to(talk, said("tools/list", _meta=META))
    assert "not-a-token" not in str(caught.value)
    assert "EDGE_TOKEN" in str(caught.value)


# --- refusals


@pytest.mark.integration
@pytest.mark.parametrize(
    ("status", "body", "expected"),
    [
        (503, b"", NotSentError),
        (503, b'{"jsonrpc":"2.0","id":null,"error":{"code":-32603,"message":"full"}}', NotSentError),
        (500, b"", LostError),
        (502, b"<html>", LostError),
        (504, b"", LostError),
        (302, b"", RefusedError),
        (403, b'{"error":"origin","message":"This origin may not use this server."}', RefusedError),
        (421, b"", RefusedError),
        (429, b'{"error":"sessions","message":"Too many."}', RefusedError),
    ],
)
async def test_what_a_status_means_for_what_was_sent(
    status: int, body: bytes, expected: type[Exception]
) -> None:
    answer = json_answer(body, status)
    async with RawServer.running(answer) as server, conversation(server.url, "t") as talk:
        with pytest.raises(expected):
            await answers_to(talk, said("ping"))


async def test_a_refusal_in_the_protocol_s_own_words_is_an_answer(relay: ServedRelay, hub: Hub) -> None:
    async with conversation(relay.mcp_url, hub.token()) as talk, talk.sent(read(b"nonsense")) as answer:
        assert answer.status == 400
        async with aclosing(answer.messages()) as messages:
            assert [value["error"]["code"] async for _, value in messages] == [-32700]


async def test_a_stream_that_is_none_is_refused(relay: ServedRelay, hub: Hub, tmp_path: Path) -> None:
    file = tmp_path / "token"
    keep_token(file, hub.token(ttl_s=60))
    async with conversation(relay.mcp_url, RenewableToken.find(file, {})) as talk:
        await opened(talk)
        session = talk.session
        assert session is not None
        hub.clock.advance(120_000)
        with pytest.raises(RefusedError):
            async with talk.stream(session):
                pass
        file.write_text(hub.token())
        with pytest.raises(NotSentError, match="changed"):
            async with talk.stream(session):
                pass
        async with talk.stream(session) as answer:
            assert answer.is_stream


@pytest.mark.integration
async def test_an_answer_in_place_of_a_stream_is_no_stream() -> None:
    async with RawServer.running(json_answer(EMPTY)) as server, conversation(server.url, "t") as talk:
        await opened(talk)
        assert talk.session is not None
        with pytest.raises(RefusedError, match="no stream"):
            async with talk.stream(talk.session):
                pass
