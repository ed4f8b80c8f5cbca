"""A flood of frames: how many of them the relay answers before it closes."""

import asyncio

from tests.fakes.raw_websocket import read_ws_frame

BOUND_S = 20


async def answered_until_cut(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, flood: bytes) -> int:
    """Send ``flood`` until the relay closes, and return how many frames it has sent meanwhile."""
    writer.write(flood)
    answered = 0
    async with asyncio.timeout(BOUND_S):
        try:
            while True:
                await read_ws_frame(reader)
                answered += 1
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
    writer.transport.abort()
    return answered
