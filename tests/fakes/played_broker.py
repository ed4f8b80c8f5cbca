"""The broker's end of one MQTT 3.1.1 connection after the other, played by a test byte by byte."""

import asyncio
import ssl
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from schemas.addresses import BrokerAddress

BOUND_S = 30
CONNECT, PUBACK, SUBSCRIBE, PINGREQ, DISCONNECT = 1, 4, 8, 12, 14
"""Types of packets that a client sends (MQTT 3.1.1 section 2.2.1)."""
_CONNACK, _REFUSED = b"\x20\x02\x00\x00", b"\x20\x02\x00\x05"
_PINGRESP = b"\xd0\x00"


def publication(topic: str, payload: bytes, packet_id: int = 0) -> bytes:
    """Return a PUBLISH packet, with QoS 1 if it has a ``packet_id``."""
    name = topic.encode()
    body = len(name).to_bytes(2, "big") + name
    body += packet_id.to_bytes(2, "big") if packet_id else b""
    return bytes([0x32 if packet_id else 0x30]) + _length(len(body) + len(payload)) + body + payload


def _length(size: int) -> bytes:
    digits = []
    while True:
        size, digit = divmod(size, 128)
        digits.append(digit | (0x80 if size else 0))
        if not size:
            return bytes(digits)


class BrokerEnd:
    """One connection of a client."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self.writer = writer

    async def receive(self) -> tuple[int, bytes]:
        """Return the type and the body of the client's next packet."""
        async with asyncio.timeout(BOUND_S):
            head = await self._reader.readexactly(1)
            size = shift = 0
            while True:
                digit = (await self._reader.readexactly(1))[0]
                size |= (digit & 0x7F) << shift
                shift += 7
                if digit < 0x80:
                    return head[0] >> 4, await self._reader.readexactly(size)

    async def accept(self) -> list[str]:
        """Accept the connection and its subscription; return the topics."""
        assert (await self.receive())[0] == CONNECT
        self.writer.write(_CONNACK)
        type_, body = await self.receive()
        assert type_ == SUBSCRIBE
        topics, rest = [], body[2:]
        while rest:
            size = int.from_bytes(rest[:2], "big")
            topics.append(rest[2 : 2 + size].decode())
            rest = rest[3 + size :]
        self.writer.write(b"\x90" + _length(2 + len(topics)) + body[:2] + b"\x01" * len(topics))
        return topics

    async def refuse(self) -> None:
        """Refuse the connection: not authorised."""
        assert (await self.receive())[0] == CONNECT
        self.writer.write(_REFUSED)

    def pong(self) -> None:
        self.writer.write(_PINGRESP)

    async def acknowledged(self, count: int) -> Sequence[int]:
        """Return the packet ids of the next ``count`` packets, all of which are acknowledgements."""
        packets = [await self.receive() for _ in range(count)]
        assert {type_ for type_, _ in packets} == {PUBACK}
        return [int.from_bytes(body, "big") for _, body in packets]

    async def until_ended(self) -> None:
        """Return when the client has ended the connection."""
        async with asyncio.timeout(BOUND_S):
            while await self._reader.read(65536):
                pass


class PlayedBroker:
    """A listener whose connections wait to be played."""

    def __init__(self, address: BrokerAddress, connections: "asyncio.Queue[BrokerEnd]") -> None:
        self.address = address
        self._connections = connections

    async def next(self) -> BrokerEnd:
        return await asyncio.wait_for(self._connections.get(), BOUND_S)

    @classmethod
    @asynccontextmanager
    async def running(cls, tls: ssl.SSLContext | None = None) -> AsyncIterator["PlayedBroker"]:
        connections: asyncio.Queue[BrokerEnd] = asyncio.Queue()
        ends: list[BrokerEnd] = []

        async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            ends.append(BrokerEnd(reader, writer))
            await connections.put(ends[-1])

        server = await asyncio.start_server(connected, "127.0.0.1", 0, ssl=tls)
        try:
            port = server.sockets[0].getsockname()[1]
            yield cls(BrokerAddress("127.0.0.1", port, tls=tls is not None), connections)
        finally:
            server.close()
            for end in ends:
                end.writer.transport.abort()
