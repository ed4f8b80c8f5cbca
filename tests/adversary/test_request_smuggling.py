"""Attacker: a client of a proxy that reads HTTP otherwise than we do. Tried: messages whose end two
readers see in two places: both lengths, two lengths, malformed chunks, line ends and white space where none
belong; each with a second request hidden in what one of the readers takes for the body.

What must happen: 400 and a close at the relay; at the node, which reads no body, one answer and a close, with
400 where the headers are malformed; never two requests out of one. Such bytes do not get as far as the
relay's own code, so that the audit has no line for them.
"""

from collections.abc import Iterator

import pytest

from kubelet.loopback import LoopbackServer
from tests.fakes.raw_http import exchange
from tests.fakes.served_relay import ServedRelay

pytestmark = pytest.mark.asyncio(loop_scope="module")

HIDDEN = b"GET /readyz HTTP/1.1\r\nHost: 127.0.0.1:%d\r\nConnection: close\r\n\r\n"


def shapes() -> Iterator[tuple[str, bytes, bytes]]:
    """Yield name, headers and the start of the body; the hidden request follows."""
    yield "length and chunks", b"Content-Length: 6\r\nTransfer-Encoding: chunked\r\n", b"0\r\n\r\n"
    yield "chunks and length", b"Transfer-Encoding: chunked\r\nContent-Length: 6\r\n", b"0\r\n\r\n"
    yield "two lengths", b"Content-Length: 0\r\nContent-Length: 70\r\n", b""
    yield "the same length twice", b"Content-Length: 1\r\nContent-Length: 1\r\n", b"x"
    yield "a list of lengths", b"Content-Length: 0, 70\r\n", b""
    yield "a signed length", b"Content-Length: +0\r\n", b""
    yield "a negative length", b"Content-Length: -1\r\n", b""
    yield "a length in hex", b"Content-Length: 0x0\r\n", b""
    yield "a length and a letter", b"Content-Length: 0a\r\n", b""
    yield "a length beyond all numbers", b"Content-Length: 18446744073709551616\r\n", b""
    yield "no length", b"Content-Length: \r\n", b""
    yield "chunks of another name", b"Transfer-Encoding: xchunked\r\n", b"0\r\n\r\n"
    yield "chunks, then something else", b"Transfer-Encoding: chunked, identity\r\n", b"0\r\n\r\n"
    yield "chunks twice", b"Transfer-Encoding: chunked\r\nTransfer-Encoding: identity\r\n", b"0\r\n\r\n"
    yield "chunks behind a tab", b"Transfer-Encoding:\x0bchunked\r\nContent-Length: 0\r\n", b""
    yield "a space before the colon", b"Transfer-Encoding : chunked\r\nContent-Length: 0\r\n", b""
    yield "a folded line", b"X: y\r\n Transfer-Encoding: chunked\r\n", b""
    yield "a folded length", b"Content-Length:\r\n 0\r\n", b""
    yield "a line that begins with a space", b" Content-Length: 0\r\n", b""
    yield "a bare line feed", b"X: y\nContent-Length: 0\r\n", b""
    yield "a bare carriage return", b"X: y\rContent-Length: 0\r\n", b""
    yield "a null byte", b"X: y\x00z\r\nContent-Length: 0\r\n", b""
    yield "a null byte in a name", b"X\x00: y\r\n", b""
    yield "a header without a colon", b"Content-Length 0\r\n", b""
    yield "a chunk of a malformed size", b"Transfer-Encoding: chunked\r\n", b"0x0\r\n\r\n"
    yield "a chunk of a negative size", b"Transfer-Encoding: chunked\r\n", b"-1\r\n\r\n"
    yield "a chunk beyond all numbers", b"Transfer-Encoding: chunked\r\n", b"FFFFFFFFFFFFFFFFF\r\n\r\n"
    yield "a chunk with a bare line feed", b"Transfer-Encoding: chunked\r\n", b"0\n\n"
    yield "a chunk longer than it says", b"Transfer-Encoding: chunked\r\n", b"1\r\nxyz\r\n0\r\n\r\n"
    yield "a chunk that ends in a space", b"Transfer-Encoding: chunked\r\n", b"0 \r\n\r\n"


SHAPES = [pytest.param(headers, body, id=name) for name, headers, body in shapes()]

NO_HEADERS = {
    "a space before the colon",
    "a folded line",
    "a folded length",
    "a line that begins with a space",
    "a bare carriage return",
    "a null byte",
    "a null byte in a name",
    "a header without a colon",
}
"""What the node refuses by itself. It reads no body, and answers the others by their method."""

AT_THE_NODE = [
    pytest.param(headers, body, b"400" if name in NO_HEADERS else b"405", id=name)
    for name, headers, body in shapes()
]


def whole(port: int, headers: bytes, body: bytes) -> bytes:
    head = b"POST /healthz HTTP/1.1\r\nHost: 127.0.0.1:%d\r\n%b\r\n" % (port, headers)
    return head + body + HIDDEN % port


@pytest.mark.parametrize(("headers", "body"), SHAPES)
async def test_no_second_request_comes_out_of_the_first(
    relay: ServedRelay, headers: bytes, body: bytes
) -> None:
    answer = await relay.exchange(whole(relay.address.port, headers, body))
    statuses = [line.split(b" ")[1] for line in answer.split(b"\r\n") if line.startswith(b"HTTP/1.")]
    assert statuses == [b"400"]
    # A malformed chunk comes behind a good head, and the head is passed on before.
    assert relay.requests in ([], ["/healthz"])
    assert relay.refusals() == []


@pytest.mark.parametrize(("headers", "body", "status"), AT_THE_NODE)
async def test_the_node_answers_one_request_and_closes_the_connection(
    loopback: LoopbackServer, headers: bytes, body: bytes, status: bytes
) -> None:
    answer = await exchange(loopback.port, whole(loopback.port, headers, body))
    statuses = [line.split(b" ")[1] for line in answer.split(b"\r\n") if line.startswith(b"HTTP/1.")]
    assert statuses == [status]
