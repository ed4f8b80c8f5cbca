"""Attacker: an agent with a good token, and a stranger without one. Tried: bodies of more than a mebibyte, by
their length, in chunks, and announced but never sent.

What must happen: 413 for the agent, without a call; 401 for the stranger, before a byte of the body was
wanted. Too much is no refusal of a stranger: there is no line in the audit for it.
"""

import asyncio

import pytest

from relay.http.body_parser import MAX_BODY_BYTES
from tests.fakes.served_relay import BOUND_S, ServedRelay, mcp_request, parsed

pytestmark = pytest.mark.asyncio(loop_scope="module")


def head(relay: ServedRelay, length: bytes, *, token: bool) -> bytes:
    _, headers = mcp_request("tools/list", {})
    if token:
        headers.append(("Authorization", f"Bearer {relay.hub.token()}"))
    lines = ["POST /mcp HTTP/1.1", f"Host: {relay.address}", *(f"{name}: {value}" for name, value in headers)]
    return "\r\n".join(lines).encode() + b"\r\n" + length + b"\r\n\r\n"


async def first_answer(relay: ServedRelay, raw: bytes) -> int:
    """Send ``raw``, of which the relay need not read everything, and return the status of its answer."""
    async with asyncio.timeout(BOUND_S):
        reader, writer = await relay.connect()
        writer.write(raw)
        answer = await reader.readuntil(b"\r\n\r\n")
        writer.close()
    return parsed(answer).status


@pytest.mark.parametrize(
    ("length", "body"),
    [
        pytest.param(b"Content-Length: %d" % (MAX_BODY_BYTES + 1), b" " * (MAX_BODY_BYTES + 1), id="sent"),
        pytest.param(b"Content-Length: %d" % (MAX_BODY_BYTES + 1), b"", id="announced"),
        pytest.param(b"Content-Length: %d" % 2**62, b"{", id="announced beyond all memory"),
        pytest.param(
            b"Transfer-Encoding: chunked",
            (b"10000\r\n" + b" " * 65_536 + b"\r\n") * (MAX_BODY_BYTES // 65_536 + 1),
            id="in chunks that do not end",
        ),
    ],
)
async def test_an_agent_is_told_that_it_is_too_much(relay: ServedRelay, length: bytes, body: bytes) -> None:
    assert await first_answer(relay, head(relay, length, token=True) + body) == 413
    assert relay.calls() == []
    assert relay.refusals() == []


async def test_a_stranger_is_refused_before_his_body(relay: ServedRelay) -> None:
    assert await first_answer(relay, head(relay, b"Content-Length: %d" % 2**62, token=False)) == 401


async def test_a_body_of_just_the_cap_is_read(relay: ServedRelay) -> None:
    body, _ = mcp_request("tools/list", {})
    length = b"Content-Length: %d" % MAX_BODY_BYTES
    assert await first_answer(relay, head(relay, length, token=True) + body.ljust(MAX_BODY_BYTES)) == 200
