"""What a stranger's requests may make the relay hold: over real sockets, with the product's own server."""

import asyncio

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from relay.http_protocol import MAX_HEAD_BYTES
from tests.fakes.raw_connection import connected, write_until_cut
from tests.fakes.serving import Server

pytestmark = pytest.mark.asyncio(loop_scope="module")

BOUND_S = 10


async def size_of_body(request: Request) -> JSONResponse:
    return JSONResponse(len(await request.body()))


@pytest.mark.parametrize(
    "start",
    [
        pytest.param(b"GET / HTTP/1.1\r\nX: ", id="one header"),
        pytest.param(b"GET /", id="the path"),
    ],
)
async def test_a_head_that_never_ends_ends_the_connection(server: Server, start: bytes) -> None:
    server.app = Starlette()
    reader, writer = await connected(server)
    writer.write(start)
    # What is on its way in buffers comes on top of the limit; it is not held.
    assert await write_until_cut(reader, writer, b"x" * 16_384) < MAX_HEAD_BYTES + 32 * 1024 * 1024


async def test_a_body_may_be_longer_than_a_head(server: Server) -> None:
    server.app = Starlette(routes=[Route("/", size_of_body, methods=["POST"])])
    reader, writer = await connected(server)
    size = MAX_HEAD_BYTES * 4
    writer.write(b"POST / HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: %d\r\n\r\n" % size + b"x" * size)
    async with asyncio.timeout(BOUND_S):
        head = await reader.readuntil(b"\r\n\r\n")
        body = await reader.readexactly(len(str(size)))
    writer.close()
    assert head.startswith(b"HTTP/1.1 200")
    assert int(body) == size
