"""A proxy that puts a bearer token on every request, for suites and tools that cannot send one.

It changes nothing else: Host and Origin pass as they came, so that what the relay says to them is seen.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

_HEAD_END = b"\r\n\r\n"
_CHUNK = 64 * 1024


@asynccontextmanager
async def token_proxy(target_port: int, token: str, port: int = 0) -> AsyncIterator[int]:
    """Serve on ``port`` of the loopback address, forward to ``target_port``, and yield the port."""
    connections: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        connections.add(task)
        try:
            await _forward(reader, writer, target_port, token)
        except (OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass  # one side hung up, or the proxy ends: so does the other side
        finally:
            connections.discard(task)
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", port)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        for task in tuple(connections):
            task.cancel()
        await asyncio.gather(*connections, return_exceptions=True)


async def _forward(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, target_port: int, token: str
) -> None:
    back_reader, back_writer = await asyncio.open_connection("127.0.0.1", target_port)
    answers = asyncio.create_task(_copy(back_reader, writer))
    try:
        while True:
            head = await reader.readuntil(_HEAD_END)
            back_writer.write(_with_token(head, token, target_port))
            await _copy_body(reader, back_writer, head)
    finally:
        answers.cancel()
        await asyncio.gather(answers, return_exceptions=True)
        back_writer.close()


def _with_token(head: bytes, token: str, target_port: int) -> bytes:
    lines = head.removesuffix(_HEAD_END).split(b"\r\n")
    own = [b"Authorization: Bearer " + token.encode("ascii")]
    kept = [line for line in lines if not line.lower().startswith(b"authorization:")]
    # The client spoke to the proxy's port; under that name the relay is not known.
    renamed = [_renamed(line, target_port) for line in kept]
    return b"\r\n".join(renamed + own) + _HEAD_END


def _renamed(line: bytes, target_port: int) -> bytes:
    name, _, value = line.partition(b":")
    host, separator, _ = value.strip().rpartition(b":")
    local = host in {b"127.0.0.1", b"localhost", b"http://127.0.0.1", b"http://localhost"}
    if name.lower() in {b"host", b"origin"} and separator and local:
        return name + b": " + host + b":" + str(target_port).encode("ascii")
    return line


async def _copy_body(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, head: bytes) -> None:
    headers = dict(line.lower().split(b":", 1) for line in head.split(b"\r\n")[1:] if b":" in line)
    length = int(headers.get(b"content-length", b"0"))
    if headers.get(b"transfer-encoding", b"").strip() == b"chunked":
        while True:
            size_line = await reader.readuntil(b"\r\n")
            size = int(size_line.strip(), 16)
            writer.write(size_line + await reader.readexactly(size + 2))
            if size == 0:
                break
    elif length:
        writer.write(await reader.readexactly(length))
    await writer.drain()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(_CHUNK):
        writer.write(data)
        await writer.drain()
    writer.close()
