import asyncio
import json
from collections.abc import Iterable, Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.types import Message, Receive, Scope, Send

from relay.auth.agent_tokens import CALLER_IN_SCOPE, Caller
from relay.http.body_parser import MAX_BODY_BYTES, MESSAGE_IN_SCOPE, BodyParser
from schemas.strict_json import MAX_DEPTH
from tests.fakes.callers import principal_of

CALLER = Caller(principal_of(""), "http", {})
CALL = b'{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{}}'
BOUND_S = 30


REFUSAL = {"jsonrpc": "2.0", "id": 1, "error": {"code": -32602, "message": "refused"}}


def _refusal_of(_caller: Caller, message: Mapping[str, Any]) -> Mapping[str, Any] | None:
    return REFUSAL if message.get("method") == "refused" else None


class Inside:
    """The application behind the parser.

    Attributes:
        scopes: of the requests that came through.
        bodies: what it read of them.
    """

    def __init__(self) -> None:
        self.scopes: list[dict[str, Any]] = []
        self.bodies: list[bytes] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.scopes.append(dict(scope))
        body, more = b"", True
        while more:
            message = await receive()
            assert message["type"] == "http.request"
            body, more = body + message.get("body", b""), message.get("more_body", False)
        self.bodies.append(body)
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body", "body": b""})


class Request:
    """One request, whose parts come when the test says so."""

    def __init__(
        self, inside: Inside, parts: Iterable[Message] = (), method: str = "POST", length: bytes | None = None
    ) -> None:
        self.sent: list[Message] = []
        self.incoming: asyncio.Queue[Message] = asyncio.Queue()
        for part in parts:
            self.incoming.put_nowait(part)
        headers = [(b"host", b"h"), *([(b"content-length", length)] if length is not None else [])]
        self._scope: Scope = {"type": "http", "method": method, "path": "/mcp", "headers": headers}
        self._scope[CALLER_IN_SCOPE] = CALLER
        self._bodies = BodyParser(inside, lambda _caller: None, _refusal_of)

    async def served(self) -> None:
        await self._bodies(self._scope, self.incoming.get, self._send)

    async def _send(self, message: Message) -> None:
        self.sent.append(message)

    @property
    def status(self) -> int | None:
        return self.sent[0]["status"] if self.sent else None

    @property
    def answer(self) -> dict[str, Any]:
        answer: dict[str, Any] = json.loads(b"".join(part.get("body", b"") for part in self.sent))
        return answer


def part(body: bytes, *, more: bool = False) -> Message:
    return {"type": "http.request", "body": body, "more_body": more}


def refused(reason: str) -> Mapping[str, Any]:
    return {
        "jsonrpc": "2.0",
        "id": None,
        "error": {"code": -32700, "message": f"Parse error: {reason}."},
    }


async def post(*parts: Message, **options: Any) -> tuple[Request, Inside]:
    inside = Inside()
    request = Request(inside, parts, **options)
    async with asyncio.timeout(BOUND_S):
        await request.served()
    return request, inside


def deep(levels: int) -> bytes:
    return b'{"a":' * (levels - 1) + b"{}" + b"}" * (levels - 1)


def message(params: bytes) -> bytes:
    return b'{"jsonrpc":"2.0","id":1,"method":"m","params":' + params + b"}"


# --- what is let through --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "body",
    [
        pytest.param(CALL, id="a call"),
        pytest.param(b" \r\n\t" + CALL + b"\n", id="white space around it"),
        pytest.param(message('{"a":"é\U0001f511"}'.encode()), id="letters beyond ASCII"),
        pytest.param(message(rb'{"a":"\ud83d\udd11"}'), id="a pair of surrogates"),
        pytest.param(message(rb'{"a":"\u0000"}'), id="a zero character"),
        pytest.param(message(b'{"a":1,"b":{"a":1}}'), id="a key in two objects"),
        pytest.param(message(b'{"a":9007199254740991}'), id="the greatest integer"),
        pytest.param(message(deep(MAX_DEPTH - 1)), id="as deep as may be"),
        pytest.param(
            message(b'"' + b"x" * (MAX_BODY_BYTES - 2 - len(message(b""))) + b'"'), id="as large as may be"
        ),
    ],
)
async def test_what_is_json_comes_through_as_it_was_with_what_it_says(body: bytes) -> None:
    request, inside = await post(part(body))
    assert request.status == 204
    assert inside.bodies == [body]
    (scope,) = inside.scopes
    assert scope[MESSAGE_IN_SCOPE] == json.loads(body)
    assert scope[CALLER_IN_SCOPE].size == len(body)
    assert scope.keys() - {"type", "method", "path", "headers"} == {CALLER_IN_SCOPE, MESSAGE_IN_SCOPE}


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        pytest.param(b"[" + CALL + b"," + CALL + b"]", "the body must be one JSON object", id="a batch"),
        pytest.param(b"[]", "the body must be one JSON object", id="an empty batch"),
        pytest.param(b"42", "the body must be one JSON object", id="a number"),
        pytest.param(b"null", "the body must be one JSON object", id="null"),
        pytest.param(
            b'{"jsonrpc":"1.0","result":["SECRET"]}',
            'jsonrpc must be "2.0"',
            id="a response of another version",
        ),
    ],
)
async def test_what_is_not_json_rpc_is_refused_without_a_dump_of_it(body: bytes, reason: str) -> None:
    request, inside = await post(part(body))
    assert request.status == 400
    expected = {"code": -32600, "message": f"Invalid Request: {reason}."}
    assert request.answer == {"jsonrpc": "2.0", "id": None, "error": expected}
    assert inside.bodies == []


async def test_a_message_that_is_refused_goes_no_further() -> None:
    request, inside = await post(part(b'{"jsonrpc":"2.0","id":1,"method":"refused","result":{}}'))
    assert (request.status, request.answer) == (400, REFUSAL)
    assert inside.bodies == []


@pytest.mark.parametrize("answered", [b'"result":{}', b'"error":{"code":1,"message":"m"}'])
async def test_an_answer_of_a_client_comes_through(answered: bytes) -> None:
    request, _ = await post(part(b'{"jsonrpc":"2.0","id":1,' + answered + b"}"))
    assert request.status == 204


@pytest.mark.parametrize("method", ["GET", "DELETE", "OPTIONS", "PUT"])
async def test_what_is_no_post_is_not_touched(method: str) -> None:
    request, inside = await post(part(b"\xff no JSON", more=True), part(b"{"), method=method)
    assert request.status == 204
    assert inside.bodies == [b"\xff no JSON{"]
    assert not {MESSAGE_IN_SCOPE} & inside.scopes[0].keys()


async def test_what_comes_after_the_body_is_heard_behind_it() -> None:
    heard: list[Message] = []

    async def listening(_scope: Scope, receive: Receive, _send: Send) -> None:
        heard.extend([await receive(), await receive()])

    gone = {"type": "http.disconnect"}
    incoming: asyncio.Queue[Message] = asyncio.Queue()
    for message in (part(CALL[:9], more=True), part(CALL[9:]), gone):
        incoming.put_nowait(message)
    scope = {"type": "http", "method": "POST", "headers": [], CALLER_IN_SCOPE: CALLER}
    async with asyncio.timeout(BOUND_S):
        await BodyParser(listening, lambda _caller: None, _refusal_of)(scope, incoming.get, _nowhere)
    assert heard == [part(CALL), gone]


async def _nowhere(_message: Message) -> None:
    raise AssertionError


# --- what is refused ------------------------------------------------------------------------------------


@pytest.mark.holds("ENVELOPE/strict-json")
@pytest.mark.parametrize(
    ("body", "reason"),
    [
        pytest.param(b"", "not JSON", id="nothing"),
        pytest.param(b"{", "not JSON", id="half of it"),
        pytest.param(CALL + CALL, "not JSON", id="two"),
        pytest.param(b"{'a':1}", "not JSON", id="other quotes"),
        pytest.param(b'{"a":1,}', "not JSON", id="a comma too many"),
        pytest.param(b"\xef\xbb\xbf{}", "not JSON", id="a byte order mark"),
        pytest.param(b'{"a":"\n"}', "not JSON", id="a bare line feed in a text"),
        pytest.param(b'{"id":1,"id":2}', "a duplicate key in an object", id="a key twice"),
        pytest.param(b'[{"a":{"b":1,"b":1}}]', "a duplicate key in an object", id="a key twice deep down"),
        pytest.param(rb'{"a":1,"\u0061":2}', "a duplicate key in an object", id="a key in two writings"),
        pytest.param(b'{"id":NaN}', "a number that is not finite", id="NaN"),
        pytest.param(b"[-Infinity]", "a number that is not finite", id="infinity"),
        pytest.param(b"[1e999]", "a number that is not finite", id="a number that becomes infinity"),
        pytest.param(b"[9007199254740992]", "an integer beyond 2^53-1", id="an integer that others round"),
        pytest.param(b"[" + b"9" * 100_000 + b"]", "an integer beyond 2^53-1", id="an endless integer"),
        pytest.param(rb'{"a":"\ud800"}', "a lone surrogate", id="a lone surrogate"),
        pytest.param(rb'{"\udfff":1}', "a lone surrogate", id="a lone surrogate in a key"),
        pytest.param(b'{"a":"\xed\xa0\x80"}', "not UTF-8", id="a surrogate in UTF-8"),
        pytest.param(b'{"a":"\xff"}', "not UTF-8", id="not UTF-8"),
        pytest.param(CALL.decode().encode("utf-16"), "not UTF-8", id="UTF-16"),
        pytest.param(deep(MAX_DEPTH + 1), "nested too deeply", id="too deep"),
        pytest.param(b"[" * 200_000, "nested too deeply", id="endlessly deep"),
    ],
)
async def test_what_is_no_json_is_refused_with_the_reason_and_goes_no_further(
    body: bytes, reason: str
) -> None:
    request, inside = await post(part(body))
    assert request.status == 400
    assert request.answer == refused(reason)
    assert (b"content-type", b"application/json") in request.sent[0]["headers"]
    assert inside.scopes == []


async def test_nothing_of_the_body_gets_into_the_refusal() -> None:
    request, _ = await post(part(b'{"secret":"secret","secret":secret'))
    assert "secret" not in json.dumps(request.answer)


@pytest.mark.parametrize(
    "parts",
    [
        pytest.param([part(b" " * (MAX_BODY_BYTES + 1))], id="at once"),
        pytest.param([part(b" " * 65_536, more=True)] * 17, id="in pieces that never end"),
    ],
)
async def test_what_is_too_large_is_refused_as_soon_as_it_is(parts: list[Message]) -> None:
    request, inside = await post(*parts)
    assert request.status == 413
    assert request.answer["id"] is None
    assert request.answer["error"]["code"] == -32600
    assert inside.scopes == []


@pytest.mark.parametrize("length", [b"%d" % (MAX_BODY_BYTES + 1), b"%d" % 2**62, b"9" * 10_000])
async def test_what_is_announced_to_be_too_large_is_refused_before_it_comes(length: bytes) -> None:
    request, inside = await post(length=length)
    assert (request.status, request.answer["error"]["code"]) == (413, -32600)
    assert inside.scopes == []


@pytest.mark.parametrize("length", [b"%d" % len(CALL), b"%d" % MAX_BODY_BYTES, b"", b"-1", b"many"])
async def test_any_other_announcement_is_not_looked_at(length: bytes) -> None:
    _, inside = await post(part(CALL), length=length)
    assert inside.bodies == [CALL]


# --- how it comes ---------------------------------------------------------------------------------------


async def test_a_body_in_small_pieces_is_whole_before_anything_looks_at_it() -> None:
    pieces = [part(CALL[at : at + 1], more=True) for at in range(len(CALL))]
    request, inside = await post(*pieces, part(b""))
    assert request.status == 204
    assert inside.bodies == [CALL]


async def test_while_pieces_are_still_to_come_nothing_is_done() -> None:
    inside = Inside()
    request = Request(inside, [part(CALL[:20], more=True)])
    serving = asyncio.create_task(request.served())
    for _ in range(10):
        await asyncio.sleep(0)
    assert request.incoming.empty()
    assert inside.scopes == []
    assert not serving.done()
    request.incoming.put_nowait({"type": "http.request", "body": CALL[20:]})
    await asyncio.wait_for(serving, BOUND_S)
    assert inside.bodies == [CALL]


async def test_a_part_without_a_body_is_none() -> None:
    _, inside = await post({"type": "http.request", "more_body": True}, part(CALL))
    assert inside.bodies == [CALL]


@pytest.mark.parametrize("before", [[], [part(CALL, more=True)]], ids=["at once", "in the middle"])
async def test_of_a_client_that_has_gone_nothing_is_done(before: list[Message]) -> None:
    request, inside = await post(*before, {"type": "http.disconnect"})
    assert request.sent == []
    assert inside.scopes == []


# --- anything at all ------------------------------------------------------------------------------------


@given(st.binary(max_size=200) | st.text('{}[]":,\\ud801aeN-', max_size=60).map(str.encode))
def test_any_bytes_either_come_through_unchanged_or_are_refused(body: bytes) -> None:
    request, inside = asyncio.run(post(part(body)))
    if request.status == 204:
        assert inside.bodies == [body]
        assert inside.scopes[0][MESSAGE_IN_SCOPE] == json.loads(body)
    else:
        assert request.status == 400
        assert request.answer["error"]["code"] in {-32700, -32600}
        assert inside.scopes == []
