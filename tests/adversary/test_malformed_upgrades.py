"""Attacker: a stranger who upgrades to a WebSocket in ways that one of the two parsers on the way refuses.
Tried: a body, transfer codings, too many or too long headers, keys and versions that are none; on every path;
with TLS and without.

What must happen: an answer of 4xx, and the connection is closed at once: none is held.
"""

import asyncio
import ssl
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path

import pytest
import pytest_asyncio

from relay.pki.relay_tls import LiveContext
from relay.settings.config import TlsFiles
from schemas.addresses import CONNECT_PATH
from schemas.tls import client_context
from tests.fakes.polling import until
from tests.fakes.serving import Server
from tests.fakes.tls_broker import PlayedAuthority

pytestmark = pytest.mark.asyncio(loop_scope="module")

BOUND_S = 30
KEY, VERSION = b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==", b"Sec-WebSocket-Version: 13"
UPGRADE = [b"Upgrade: websocket", b"Connection: Upgrade"]
GOOD = [*UPGRADE, KEY, VERSION]

REFUSED_BY_THE_PARSER = {
    "a length": [*GOOD, b"Content-Length: 5"],
    "a length and a body": [*GOOD, b"Content-Length: 5", b"", b"hello"],
    "two lengths": [*GOOD, b"Content-Length: 0", b"Content-Length: 0"],
    "chunked": [*GOOD, b"Transfer-Encoding: chunked"],
    "chunked, with a chunk": [*GOOD, b"Transfer-Encoding: chunked", b"", b"5", b"hello", b"0", b"", b""],
    "another coding": [*GOOD, b"Transfer-Encoding: gzip, chunked"],
    "129 headers": [*GOOD, *(b"X-%d: y" % number for number in range(129 - len(GOOD)))],
    "a long header": [*GOOD, b"X: " + b"y" * 9000],
}
REFUSED_BY_THE_HANDSHAKE = {
    "no key": [*UPGRADE, VERSION],
    "two keys": [*GOOD, KEY],
    "a key that is no base64": [*UPGRADE, b"Sec-WebSocket-Key: ?", VERSION],
    "a short key": [*UPGRADE, b"Sec-WebSocket-Key: c2hvcnQ=", VERSION],
    "no version": [*UPGRADE, KEY],
    "two versions": [*GOOD, VERSION],
    "another version": [*UPGRADE, KEY, b"Sec-WebSocket-Version: 12"],
}
PATHS = [CONNECT_PATH, "/mcp", "/nowhere"]


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["plain", "tls"])
async def spoken(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[tuple[Server, ssl.SSLContext | None]]:
    """A server, and what speaks to it."""
    if request.param == "plain":
        async with Server.running() as server:
            yield server, None
        return
    authority = PlayedAuthority(Path(tmp_path_factory.mktemp("tls")), time.time_ns() // 1_000_000)
    shown = authority.server("relay")
    context = LiveContext(TlsFiles(shown.certificate, shown.key)).context
    async with Server.running(context) as server:
        yield server, client_context(authority.servers.root_pem)


async def answer_to(server: Server, context: ssl.SSLContext | None, head: bytes) -> bytes:
    """Return what comes until the relay closes, by itself, and no later than a request may take."""
    said = b""
    async with asyncio.timeout(BOUND_S):
        reader, writer = await asyncio.open_connection(server.address.host, server.address.port, ssl=context)
        writer.write(head)
        with suppress(ConnectionError):
            while piece := await reader.read(65_536):
                said += piece
    writer.close()
    await until(lambda: not len(server.connections))
    return said


def head_of(path: str, lines: list[bytes]) -> bytes:
    return b"\r\n".join([b"GET %s HTTP/1.1" % path.encode(), b"Host: 127.0.0.1", *lines, b"", b""])


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("case", [*REFUSED_BY_THE_PARSER, *REFUSED_BY_THE_HANDSHAKE])
async def test_a_malformed_upgrade_is_answered_and_closed(
    spoken: tuple[Server, ssl.SSLContext | None], path: str, case: str
) -> None:
    head = head_of(path, (REFUSED_BY_THE_PARSER | REFUSED_BY_THE_HANDSHAKE)[case])
    assert (await answer_to(*spoken, head)).startswith(b"HTTP/1.1 400 ")


@pytest.mark.parametrize(
    "head",
    [
        pytest.param(head_of("/" + "x" * 9000, GOOD), id="a long path"),
        pytest.param(head_of("/ÿ", GOOD), id="a path of another charset"),
        pytest.param(head_of("/", GOOD).replace(b"GET", b"POST"), id="a method"),
    ],
)
async def test_an_upgrade_with_another_first_line_is_refused_and_closed(
    spoken: tuple[Server, ssl.SSLContext | None], head: bytes
) -> None:
    assert (await answer_to(*spoken, head)).startswith(b"HTTP/1.1 4")


async def test_a_good_upgrade_reaches_the_application(
    spoken: tuple[Server, ssl.SSLContext | None],
) -> None:
    # Which has no WebSockets: what is refused above is refused for what is wrong with it.
    assert (await answer_to(*spoken, head_of("/", GOOD))).startswith(b"HTTP/1.1 403 ")
