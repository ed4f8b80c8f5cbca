"""Frames of WebSockets as bytes, for an attacker who violates the protocol.

Only what a client sends is made here, and only what a server sends is read.
"""

import asyncio
from contextlib import suppress

BOUND_S = 20
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
