import asyncio
import ssl
from pathlib import Path

import pytest

from kubelet.identity.http_exchange import HttpRequest, NoAnswerError, exchange
from relay.settings.environment import now_ms
from schemas.tls import client_context
from tests.fakes.raw_http_server import Asked, RawServer, http_answer, server_context
from tests.fakes.signer import SimulatedCa

pytestmark = pytest.mark.integration

LIMIT = 64 * 1024


class Saying:
    """Answers with ``pieces``, and then stays there or leaves."""

    def __init__(self, *pieces: bytes, stays: bool = False) -> None:
        self.pieces = pieces
        self.stays = stays
        self.left = asyncio.Event()

    async def __call__(self, _asked: Asked, writer: asyncio.StreamWriter) -> None:
        for piece in self.pieces:
            writer.write(piece)
            await writer.drain()
        if self.stays:
            await self.left.wait()


@pytest.fixture(scope="module")
def ca() -> SimulatedCa:
    return SimulatedCa("root of today", now_ms())


async def test_a_question_without_a_body_is_a_get_and_one_with_a_body_a_post_of_json() -> None:
    async with RawServer.running(Saying(http_answer(200, b"here"))) as server:
        got = await exchange(HttpRequest(server.url, "/path"), client_context())
        posted = await exchange(HttpRequest(server.url, "/path", b'{"a":1}'), client_context())
    assert (got.status, got.body) == (posted.status, posted.body) == (200, b"here")
    get, post = server.asked
    assert get.head.startswith("GET /path HTTP/1.1\r\n")
    assert f"\r\nHost: {server.url.removeprefix('http://')}\r\n" in get.head
    assert post.head.startswith("POST /path HTTP/1.1\r\n")
    assert "\r\nContent-Type: application/json\r\n" in post.head
    assert post.body == b'{"a":1}'


@pytest.mark.parametrize(
    ("answer", "status", "body"),
    [
        pytest.param(http_answer(403, b"no"), 403, b"no", id="a refusal"),
        pytest.param(http_answer(307, b"", Location="http://elsewhere.example"), 307, b"", id="a redirect"),
        pytest.param(b"HTTP/1.0 200 OK\r\n\r\nuntil the end", 200, b"until the end", id="without a length"),
        pytest.param(
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n",
            200,
            b"abcde",
            id="in chunks",
        ),
    ],
)
async def test_an_answer_is_returned_as_it_is_in_whatever_form_it_came(
    answer: bytes, status: int, body: bytes
) -> None:
    async with RawServer.running(Saying(answer)) as server:
        got = await exchange(HttpRequest(server.url, "/"), client_context())
    assert (got.status, got.body) == (status, body)
    assert len(server.asked) == 1


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("15", 15),
        ("0", 0),
        ("999999999", 86_400),
        ("-1", None),
        ("1.5", None),
        ("9" * 5000, None),
        ("soon", None),
    ],
)
async def test_a_retry_time_is_a_number_of_seconds_within_a_day(text: str, seconds: int | None) -> None:
    async with RawServer.running(Saying(http_answer(503, b"", **{"Retry-After": text}))) as server:
        got = await exchange(HttpRequest(server.url, "/"), client_context())
    assert got.retry_after_s == seconds


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        pytest.param(b"", "does not speak HTTP", id="nothing"),
        pytest.param(b"220 mail.example ESMTP\r\n", "does not speak HTTP", id="another protocol"),
        pytest.param(
            b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nabc", "does not speak HTTP", id="cut short"
        ),
        pytest.param(
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
            "does not speak HTTP",
            id="no chunk",
        ),
        pytest.param(
            b"HTTP/1.1 200 OK\r\n" + b"x: y\r\n" * 200 + b"\r\n", "does not speak HTTP", id="many headers"
        ),
        pytest.param(http_answer(200, b"x" * LIMIT), "with more than a relay would", id="too much"),
    ],
)
async def test_what_is_no_answer_is_said_to_be_none(answer: bytes, text: str) -> None:
    async with RawServer.running(Saying(answer)) as server:
        with pytest.raises(NoAnswerError, match=text):
            await exchange(HttpRequest(server.url, "/"), client_context())


@pytest.mark.parametrize(
    "pieces",
    [
        pytest.param([], id="nothing"),
        pytest.param([b"HTTP/1.1 200 OK\r\n"], id="half a head"),
        pytest.param([http_answer(200, b"x" * 10)[:-1]], id="all but a byte"),
    ],
)
async def test_a_server_that_does_not_come_to_an_end_is_given_up_on(pieces: list[bytes]) -> None:
    saying = Saying(*pieces, stays=True)
    async with RawServer.running(saying) as server:
        with pytest.raises(NoAnswerError, match=r"does not answer within 0\.2 s"):
            await exchange(HttpRequest(server.url, "/"), client_context(), timeout_s=0.2)
        saying.left.set()


async def test_a_server_that_is_not_there_is_said_not_to_be() -> None:
    async with RawServer.running(Saying()) as server:
        pass
    with pytest.raises(NoAnswerError, match="cannot be reached"):
        await exchange(HttpRequest(server.url, "/"), client_context())


async def test_a_server_that_is_believed_is_asked_over_tls(ca: SimulatedCa, tmp_path: Path) -> None:
    context = server_context(ca, tmp_path, now_ms())
    async with RawServer.running(Saying(http_answer(200, b"here")), context) as server:
        assert server.url.startswith("https://")
        got = await exchange(HttpRequest(server.url, "/"), client_context(ca.root_pem))
    assert got.body == b"here"


@pytest.mark.parametrize("host", ["127.0.0.1", "other.example"])
async def test_to_a_server_that_is_not_believed_nothing_is_said(
    ca: SimulatedCa, tmp_path: Path, host: str
) -> None:
    context = server_context(ca, tmp_path, now_ms(), host=host)
    believed = ca if host == "other.example" else SimulatedCa("another root", now_ms())
    async with RawServer.running(Saying(http_answer(200, b"here")), context) as server:
        with pytest.raises(ssl.SSLCertVerificationError):
            await exchange(HttpRequest(server.url, "/", b"a secret"), client_context(believed.root_pem))
    assert server.asked == []


async def test_a_server_that_speaks_no_tls_is_not_spoken_to_without() -> None:
    async with RawServer.running(Saying(b"plain")) as server:
        url = server.url.replace("http:", "https:")
        with pytest.raises(NoAnswerError):
            await exchange(HttpRequest(url, "/"), client_context(), timeout_s=0.5)
    assert server.asked == []
