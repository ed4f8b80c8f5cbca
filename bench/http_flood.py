"""A flood of HTTP from many connections, which waits for no answer; and a server that reads and drops it.

Run as a process, ``flood`` or ``drop``, it listens on a port once it floods, or drops; at that port a flood
tells how often it has sent. What is sent is in a file; so much of it a second that a slow machine can send it
too. Must be a process of its own where anything is measured: its own cost must not be taken for the relay's.
"""

import asyncio
import sys
from contextlib import suppress
from pathlib import Path

_TICK_S = 0.01


class _Sender(asyncio.Protocol):
    """One connection of the flood."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        if isinstance(transport, asyncio.Transport):
            self.transport = transport

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - as asyncio has it
        self.transport = None


async def flood(port: int, said: bytes, connections: int, ready_port: int) -> None:
    """Send ``said`` once a second on each of ``connections``, and begin anew with those that are cut off."""
    loop = asyncio.get_running_loop()
    senders = [_Sender() for _ in range(connections)]
    opening: set[asyncio.Task[None]] = set()

    async def open_again(sender: _Sender) -> None:
        with suppress(OSError):
            await loop.create_connection(lambda: sender, "127.0.0.1", port)

    sent = 0

    def tell(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"%d" % sent)
        writer.close()

    async with await asyncio.start_server(tell, "127.0.0.1", ready_port):
        turn, at = 0, loop.time()
        while True:
            at += _TICK_S
            for _ in range(max(1, int(connections * _TICK_S))):
                sender, turn = senders[turn % connections], turn + 1
                if sender.transport is None:
                    task = loop.create_task(open_again(sender))
                    opening.add(task)
                    task.add_done_callback(opening.discard)
                elif not sender.transport.get_write_buffer_size():
                    sender.transport.write(said)
                    sent += 1
            await asyncio.sleep(max(0.0, at - loop.time()))


class _Dropper(asyncio.Protocol):
    """Reads, and does nothing else."""


async def drop(port: int) -> None:
    """Read what comes to ``port``, and answer nothing."""
    server = await asyncio.get_running_loop().create_server(_Dropper, "127.0.0.1", port, backlog=2048)
    async with server:
        await server.serve_forever()


if __name__ == "__main__":
    kind, *rest = sys.argv[1:]
    if kind == "drop":
        asyncio.run(drop(int(rest[0])))
    else:
        at_port, file, count, ready_at = rest
        asyncio.run(flood(int(at_port), Path(file).read_bytes(), int(count), int(ready_at)))
