"""A proxy for suites and tools that cannot send a token, or that call tools by names of their own.

It puts a bearer token on every request, and renames tools where a test names them: in requests from the
client's name to the relay's, in answers back. It changes nothing else: Host and Origin pass as they came, so
that what the relay says to them is seen, and so do other names, wrong ones among them.
"""

import asyncio
import re
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass

_HEAD_END = b"\r\n\r\n"
_LENGTH = re.compile(rb"(\r\ncontent-length:)[^\r]*", re.IGNORECASE)
_NO_NAMES: Mapping[str, str] = {}

Rename = Callable[[bytes], bytes]


@dataclass(frozen=True, slots=True)
class _Route:
    """Where requests go, and what is done to them and to their answers."""

    port: int
    token: bytes
    names: Mapping[bytes, bytes]

    def request_head(self, head: bytes) -> bytes:
        lines = head.removesuffix(_HEAD_END).split(b"\r\n")
        own = [b"Authorization: Bearer " + self.token]
        kept = [line for line in lines if not line.lower().startswith(b"authorization:")]
        return b"\r\n".join([*map(self._header, kept), *own]) + _HEAD_END

    def request_body(self, body: bytes) -> bytes:
        # With its quotes: no name is changed that only begins with one of these.
        for theirs, ours in self.names.items():
            body = body.replace(b'"' + theirs + b'"', b'"' + ours + b'"')
        return body

    def answer_body(self, body: bytes) -> bytes:
        for theirs, ours in self.names.items():
            body = body.replace(b'"' + ours + b'"', b'"' + theirs + b'"')
        return body

    def _header(self, line: bytes) -> bytes:
        name, _, value = line.partition(b":")
        stated = value.strip()
        if name.lower() == b"mcp-name" and stated in self.names:
            # The white space around it stays: what the relay makes of that is looked at.
            return name + b":" + value.replace(stated, self.names[stated])
        host, separator, _ = stated.rpartition(b":")
        local = host in {b"127.0.0.1", b"localhost", b"http://127.0.0.1", b"http://localhost"}
        if name.lower() in {b"host", b"origin"} and separator and local:
            # The client spoke to the proxy's port; under that name the relay is not known.
            return name + b": " + host + b":" + str(self.port).encode("ascii")
        return line


@asynccontextmanager
async def token_proxy(
    target_port: int, token: str, names: Mapping[str, str] = _NO_NAMES
) -> AsyncIterator[int]:
    """Serve on the loopback address, forward to ``target_port``, and yield the port.

    ``names`` has the relay's name of a tool by the client's.
    """
    connections: set[asyncio.Task[None]] = set()
    route = _Route(
        target_port,
        token.encode("ascii"),
        {theirs.encode("ascii"): ours.encode("ascii") for theirs, ours in names.items()},
    )

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        connections.add(task)
        try:
            await _forward(reader, writer, route)
        except (OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass  # one side closed, or the proxy ends: so does the other side
        finally:
            connections.discard(task)
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        for task in tuple(connections):
            task.cancel()
        await asyncio.gather(*connections, return_exceptions=True)


async def _forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, route: _Route) -> None:
    back_reader, back_writer = await asyncio.open_connection("127.0.0.1", route.port)
    answers = asyncio.create_task(_answer(back_reader, writer, route))
    try:
        while True:
            await _copy_message(reader, back_writer, route.request_head, route.request_body)
    finally:
        answers.cancel()
        await asyncio.gather(answers, return_exceptions=True)
        back_writer.close()


async def _answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, route: _Route) -> None:
    try:
        while True:
            await _copy_message(reader, writer, bytes, route.answer_body)
    finally:
        writer.close()


async def _copy_message(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, rename_head: Rename, rename_body: Rename
) -> None:
    """Pass one message on, a chunk at a time: the relay sends an event in one, and no name is ever torn."""
    head = rename_head(await reader.readuntil(_HEAD_END))
    headers = dict(line.lower().split(b":", 1) for line in head.split(b"\r\n")[1:] if b":" in line)
    if headers.get(b"transfer-encoding", b"").strip() == b"chunked":
        writer.write(head)
        while await _copy_chunk(reader, writer, rename_body):
            await writer.drain()
    else:
        body = rename_body(await reader.readexactly(int(headers.get(b"content-length", b"0"))))
        writer.write(_with_length(head, len(body)) + body)
    await writer.drain()


async def _copy_chunk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, rename: Rename) -> bool:
    """Pass one chunk on, and return whether another follows."""
    size = int((await reader.readuntil(b"\r\n")).strip(), 16)
    chunk = rename((await reader.readexactly(size + 2)).removesuffix(b"\r\n"))
    writer.write(b"%x\r\n%b\r\n" % (len(chunk), chunk))
    return size > 0


def _with_length(head: bytes, length: int) -> bytes:
    return _LENGTH.sub(b"\\g<1> %d" % length, head)
