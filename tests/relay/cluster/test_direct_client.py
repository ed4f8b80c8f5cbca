# ruff: noqa: SLF001 - that what the library does in these places is not needed

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Self

import pytest
from nats.aio.msg import Msg
from nats.js.api import Header

from relay.cluster import direct_client
from relay.cluster.direct_client import DirectClient, respond_now
from relay.cluster.direct_subscription import subscribe
from schemas.process.logs import make_logger
from tests.fakes.lines import LogLines
from tests.fakes.polling import BOUND_S, until

pytestmark = pytest.mark.integration

INFO = b'INFO {"server_id":"a","version":"2.15.0","max_payload":1048576,"headers":true}\r\n'
PING, PONG = b"PING\r\n", b"PONG\r\n"


@dataclass
class RawServer:
    """A server of one client, of which a test sends and reads the bytes.

    Attributes:
        read: what the client has sent since its handshake.
    """

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    client: DirectClient
    closed: asyncio.Event
    read: bytearray = field(default_factory=bytearray)

    @classmethod
    @asynccontextmanager
    async def connected(cls) -> AsyncIterator[Self]:
        """Hold a server, and the client that is connected to it."""
        accepted: asyncio.Queue[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = asyncio.Queue()

        async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(INFO)
            await reader.readuntil(PING)
            writer.write(PONG)
            accepted.put_nowait((reader, writer))

        client, closed = DirectClient("edge.probe"), asyncio.Event()

        async def ended() -> None:
            closed.set()

        async def ignored(_error: Exception) -> None:
            return

        listening = await asyncio.start_server(accept, "127.0.0.1")
        port = listening.sockets[0].getsockname()[1]
        await client.connect(
            f"nats://127.0.0.1:{port}",
            allow_reconnect=False,
            max_reconnect_attempts=1,
            closed_cb=ended,
            error_cb=ignored,
        )
        reader, writer = await accepted.get()
        try:
            yield cls(reader, writer, client, closed)
        finally:
            await client.close()
            writer.close()
            listening.close()
            await listening.wait_closed()

    async def until_read(self, wanted: bytes) -> None:
        """Read until ``wanted`` has come."""
        async with asyncio.timeout(BOUND_S):
            while wanted not in self.read:
                self.read += await self.reader.read(65536)

    async def heard(self) -> list[Msg]:
        """Return where the messages of a direct subscription, which has the number 1, arrive."""
        messages: list[Msg] = []
        await subscribe(self.client, "edge.direct", messages.append, make_logger("relay", LogLines()))
        await self.until_read(b"SUB edge.direct  1\r\n")
        return messages


@pytest.mark.parametrize(
    ("sent", "headers"),
    [
        (b"MSG edge.direct 1 edge.reply 5\r\nhello\r\n", None),
        (b"HMSG edge.direct 1 edge.reply 18 23\r\nNATS/1.0\r\nA: b\r\n\r\nhello\r\n", {"A": "b"}),
    ],
    ids=["without headers", "with headers"],
)
async def test_a_message_is_handled_although_the_library_reads_nothing(
    sent: bytes, headers: dict[str, str] | None
) -> None:
    async with RawServer.connected() as server:
        messages = await server.heard()
        reading = server.client._reading_task
        assert reading is not None
        reading.cancel()
        server.writer.write(sent)
        await until(lambda: messages)
        (message,) = messages
        assert (message.subject, message.reply, message.data) == ("edge.direct", "edge.reply", b"hello")
        assert message.headers == headers


async def test_what_is_published_is_written_although_the_library_flushes_nothing() -> None:
    async with RawServer.connected() as server:
        flushing = server.client._flusher_task
        assert flushing is not None
        await server.client.publish("edge.direct", b"hello", "edge.reply")
        assert server.client.pending_data_size == 0
        assert flushing.cancel()
        await server.until_read(b"PUB edge.direct edge.reply 5\r\nhello\r\n")


async def test_what_is_published_with_headers_is_written_at_once_too() -> None:
    async with RawServer.connected() as server:
        await server.client.publish("edge.direct", b"hello", "edge.reply", {"Name": "value"})
        assert server.client.pending_data_size == 0
        await server.until_read(
            b"HPUB edge.direct edge.reply 25 30\r\nNATS/1.0\r\nName: value\r\n\r\nhello\r\n"
        )
        assert not server.client.publish_now("edge.direct", b"hello", "", {"Name": "value\r\nOther: "})
        await server.client.publish("edge.direct", b"", "", {Header.MSG_TTL: "1"})
        await server.until_read(b"HPUB edge.direct  25 25\r\nNATS/1.0\r\nNats-TTL: 1\r\n\r\n\r\n")


async def test_a_message_is_answered_at_once_unless_there_is_nothing_to_answer_or_no_connection() -> None:
    async with RawServer.connected() as server:
        messages = await server.heard()
        server.writer.write(b"MSG edge.direct 1 edge.reply 5\r\nhello\r\nMSG edge.direct 1 5\r\nhello\r\n")
        await until(lambda: len(messages) == 2)
        asked, told = messages
        assert respond_now(asked, b"world")
        await server.until_read(b"PUB edge.reply  5\r\nworld\r\n")
        assert not respond_now(told, b"world")
        await server.client.close()
        assert not respond_now(asked, b"world")


async def test_messages_arrive_in_pieces_of_any_size() -> None:
    stream = (
        b"MSG edge.direct 1 7\r\nfirst\r\n\r\n"
        b"PING\r\n"
        b"MSG edge.library 2 5\r\nother\r\n"
        b"HMSG edge.direct 1 edge.reply 30 30\r\nNATS/1.0 503 No Responders\r\n\r\n\r\n"
        b"HMSG edge.direct 1 edge.reply 29 34\r\nNATS/1.0\r\nName: a: b\r\nodd\r\n\r\nnamed\r\n"
        b"MSG edge.none 3 4\r\nnone\r\n"
        b"MSG  edge.direct\t1 edge.reply 6\r\nMSG a \r\n"
    )
    for size in (1, 2, 3, 7, 40, len(stream)):
        await arrives_in_pieces(stream, size)


async def arrives_in_pieces(stream: bytes, size: int) -> None:
    async with RawServer.connected() as server:
        messages, others = await server.heard(), list[bytes]()

        async def other(message: Msg) -> None:
            others.append(message.data)

        await server.client.subscribe("edge.library", cb=other)
        wire = server.client._wire
        assert wire is not None
        for begin in range(0, len(stream), size):
            wire.data_received(stream[begin : begin + size])
        await until(lambda: len(messages) == 4)
        # What the server says of its own comes by way of the library, in a later turn.
        read = {message.data: message.headers for message in messages}
        assert read == {
            b"first\r\n": None,
            b"named": {"Name": "a: b"},
            b"MSG a ": None,
            b"": {"Status": "503", "Description": "No Responders"},
        }
        await until(lambda: others == [b"other"])
        await server.until_read(PONG)


@pytest.mark.parametrize(
    "line",
    [
        b"MSG\r\n",
        b"HMSG edge.direct 1 1\r\n",
        b"MSG edge.direct 1\r\n",
        b"MSG edge.direct x 1\r\n",
        b"MSG edge.direct 1 -9\r\n",
        b"\r\n",
    ],
)
async def test_a_malformed_line_ends_the_connection_by_the_library(line: bytes) -> None:
    async with RawServer.connected() as server:
        messages = await server.heard()
        server.writer.write(line + b"MSG edge.direct 1 1\r\n")
        await asyncio.wait_for(server.closed.wait(), BOUND_S)
        assert messages == []


async def test_a_message_that_does_not_end_ends_the_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct_client, "MAX_UNFINISHED_BYTES", 1000)
    async with RawServer.connected() as server:
        await server.heard()
        server.writer.write(b"MSG edge.direct 1 2000\r\n" + b"x" * 1500)
        await asyncio.wait_for(server.closed.wait(), BOUND_S)


async def test_what_a_server_does_not_read_waits_and_is_sent_in_order() -> None:
    async with RawServer.connected() as server:
        sent = 0
        async with asyncio.timeout(BOUND_S):
            while server.client.pending_data_size == 0:  # the sockets take some mebibytes
                await server.client.publish("edge.direct", b"%06d" % sent + b"x" * 60_000)
                sent += 1
        assert not server.client.publish_now("edge.direct", b"too early")
        await server.client.publish("edge.direct", b"the last")
        assert server.client.pending_data_size > 0
        await server.until_read(b"the last")
        numbers = [int(part[:6]) for part in bytes(server.read).split(b"60006\r\n")[1:]]
        assert numbers == list(range(sent))
        assert server.client.pending_data_size == 0
