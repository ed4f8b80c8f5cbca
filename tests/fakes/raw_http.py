"""Bytes over a socket unchanged: a client library would correct what an attacker has malformed."""

import asyncio
from collections.abc import Hashable
from contextlib import suppress

from relay.http.connections import AcceptedConnection, Bounds, Connections
from relay.observability.metrics import Metrics
from tests.fakes.hub import counted

BOUND_S = 30
UPGRADE = (
    b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n"
)


async def exchange(port: int, raw: bytes) -> bytes:
    """Send ``raw`` to a loopback ``port`` and return all that comes until the other end closes."""
    async with asyncio.timeout(BOUND_S):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        said = b""
        try:
            writer.write(raw)
            while piece := await reader.read(65_536):
                said += piece
        except ConnectionError:
            pass  # it closed with bytes of ours unread
        writer.close()
    return said


# --- Frames of WebSockets as bytes, for an attacker who violates the protocol.


_CLOSE = 8


def ws_frame(payload: bytes, *, opcode: int = 1, fin: bool = True, reserved: int = 0) -> bytes:
    """Return one frame of a WebSocket as a client sends it, under a mask of zeros."""
    size = len(payload)
    short = size if size < 126 else 126 if size < 65_536 else 127
    length = b"" if short < 126 else size.to_bytes(2 if short == 126 else 8, "big")
    return bytes([fin << 7 | reserved | opcode, 0x80 | short]) + length + bytes(4) + payload


async def read_ws_frame(reader: asyncio.StreamReader) -> bytes:
    """Return the payload of the next frame that a server sends."""
    return (await _opcode_and_payload(reader))[1]


async def until_closed(reader: asyncio.StreamReader) -> int | None:
    """Read until the relay closes, and return with which code; None when it closed without a close frame."""
    opcode, payload = -1, b""
    try:
        while opcode != _CLOSE:
            opcode, payload = await _opcode_and_payload(reader)
    except (asyncio.IncompleteReadError, ConnectionError):
        return None
    return int.from_bytes(payload[:2], "big")


async def until_cut(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> int | None:
    """As ``until_closed``, and wait until the relay has ended the connection, by itself."""
    code = await until_closed(reader)
    async with asyncio.timeout(BOUND_S):
        with suppress(ConnectionError):
            await reader.read()
    writer.close()
    return code


async def _opcode_and_payload(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    async with asyncio.timeout(BOUND_S):
        first, size = await reader.readexactly(2)
        if size > 125:
            size = int.from_bytes(await reader.readexactly(2 if size == 126 else 8), "big")
        return first & 0x0F, await reader.readexactly(size)


# --- Connections of agents, as a server holds them, without sockets.


_BOUNDS = Bounds(total=8, unauthenticated=4, per_address=2, per_holder=3)


class HeldConnections:
    """Connections with low limits.

    Attributes:
        per_holder: how many an agent may hold.
    """

    per_holder = _BOUNDS.per_holder

    def __init__(self) -> None:
        self._metrics = Metrics()
        self._connections = Connections(_BOUNDS, self._metrics.connections_refused)

    def hold(self, holder: Hashable) -> AcceptedConnection:
        """Return a new connection that counts towards ``holder``, which must be possible."""
        connection = self._connections.begin("127.0.0.1")
        assert connection is not None
        assert connection.admit(holder)
        return connection

    def refused(self) -> float:
        """Return how often an agent was refused another connection."""
        return counted(self._metrics, "connections_refused_total", reason="holder")
