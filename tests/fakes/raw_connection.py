"""Connections to the relay's server byte by byte, as an attacker holds them."""

import asyncio

from tests.fakes.serving import Server

BOUND_S = 30


async def connected(server: Server) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection(server.address.host, server.address.port)


async def write_until_cut(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, chunk: bytes) -> int:
    """Send ``chunk`` until the relay disconnects, and return how many bytes it took."""
    sent = 0
    async with asyncio.timeout(BOUND_S):
        try:
            while not reader.at_eof():
                writer.write(chunk)
                await writer.drain()
                sent += len(chunk)
        except (OSError, ConnectionError):
            pass
    writer.close()
    return sent
