"""The reference for memory: a bare ``websockets`` server that holds idle connections."""

import asyncio
import sys

from websockets.asyncio.server import ServerConnection, serve


async def hold(connection: ServerConnection) -> None:
    """Keep the connection until the client goes."""
    await connection.wait_closed()


async def main(port: int) -> None:
    """Serve on ``port`` of the loopback address, as the relay does: no compression, pings."""
    async with serve(hold, "127.0.0.1", port, compression=None, ping_interval=15, ping_timeout=10) as server:
        await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1])))
