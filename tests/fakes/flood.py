"""What a flood of frames comes to: how many the relay answers before it hangs up."""

import asyncio

from tests.fakes.raw_websocket import read_ws_frame

BOUND_S = 20


async def answered_until_cut(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, flood: bytes) -> int:
    """Send ``flood`` until the relay hangs up, and return how many frames it has sent meanwhile."""
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
