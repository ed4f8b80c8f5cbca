"""Attacker: a stranger with many connections. Tried: a request whose head does not end: one header
without end, headers without end, a path without end; and a head of which half has come and no more will.

What must happen: what goes on is cut off when it is over its limit, without an answer and without a line in
the audit, for it is no request yet. What has stopped is cut off when its time is up.
"""

import asyncio

import pytest

from relay.http.http_protocol import MAX_HEAD_BYTES
from tests.fakes.hub import Hub
from tests.fakes.served_relay import BOUND_S, ServedRelay
from tests.fakes.serving import Server

pytestmark = pytest.mark.asyncio(loop_scope="module")

_ON_ITS_WAY = 32 * 1024 * 1024
"""What buffers on both sides may have taken in before the cut is noticed."""


@pytest.mark.parametrize(
    ("start", "more"),
    [
        pytest.param(b"GET /", b"x" * 16_384, id="a path"),
        pytest.param(b"GET /?", b"x=y&" * 4096, id="a query"),
        pytest.param(b"GET / HTTP/1.1\r\nX: ", b"x" * 16_384, id="a header"),
        pytest.param(b"GET / HTTP/1.1\r\n", b"X: y\r\n" * 2048, id="headers"),
        pytest.param(b"GET / HTTP/1.1\r\n", b"X" * 16_384, id="a header's name"),
        pytest.param(b"G", b"E" * 16_384, id="a method"),
    ],
)
async def test_a_head_without_end_is_cut_off(relay: ServedRelay, start: bytes, more: bytes) -> None:
    reader, writer = await relay.connect()
    writer.write(start)
    sent = 0
    async with asyncio.timeout(BOUND_S):
        try:
            while not reader.at_eof():
                writer.write(more)
                await writer.drain()
                sent += len(more)
        except ConnectionError:
            pass
    writer.close()
    assert sent < MAX_HEAD_BYTES + _ON_ITS_WAY
    assert relay.requests == []


async def test_half_a_head_is_not_waited_for_without_an_end(hub: Hub) -> None:
    async with Server.running(request_timeout_s=0.2) as server, ServedRelay.open(hub, server) as relay:
        await hang_up_on_halves(relay)


async def hang_up_on_halves(relay: ServedRelay) -> None:
    connections = []
    head = b"POST /mcp HTTP/1.1\r\nHost: 127.0.0.1\r\n"
    for start in (b"", b"\r\n" * MAX_HEAD_BYTES, b"GET", head, head + b"Content-Length: 9\r\n\r\nhalf"):
        reader, writer = await relay.connect()
        writer.write(start)
        connections.append((reader, writer))
    hanging_up = [asyncio.create_task(reader.read()) for reader, _ in connections]
    _, waited_for = await asyncio.wait(hanging_up, timeout=BOUND_S)
    for _, writer in connections:
        writer.close()
    await asyncio.gather(*hanging_up, return_exceptions=True)
    assert len(waited_for) == 0
