"""Each fault of the proxy does to the bytes what its description says, while it lasts."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress

import pytest

from schemas.addresses import BrokerAddress
from tests.fakes.fault_proxy import FaultProxy, LinkFault


class Ends:
    """Connections through a proxy, and both of their ends."""

    def __init__(self, proxy: FaultProxy, accepted: "asyncio.Queue[asyncio.StreamReader]") -> None:
        self.proxy = proxy
        self._accepted = accepted
        self._writers: list[asyncio.StreamWriter] = []

    async def connect(self) -> tuple[asyncio.StreamWriter, asyncio.StreamReader]:
        """Connect, and return what writes at one end and what reads at the other."""
        await self.dial()
        writer, reader = self._writers[-1], await self._accepted.get()
        # The target has accepted a moment before the proxy passes bytes on.
        writer.write(b".")
        assert await reader.readexactly(1) == b"."
        return writer, reader

    async def dial(self) -> asyncio.StreamReader:
        """Connect to the proxy alone, and return what reads from it."""
        address = self.proxy.address
        reader, writer = await asyncio.open_connection(address.host, address.port)
        self._writers.append(writer)
        return reader

    def close(self) -> None:
        for writer in self._writers:
            writer.transport.abort()


async def until_ended(reader: asyncio.StreamReader) -> None:
    """Return when the connection has ended, in whichever way, and nothing more has arrived."""
    with suppress(ConnectionError):
        assert await reader.read() == b""


@pytest.fixture
async def ends() -> AsyncIterator[Ends]:
    accepted: asyncio.Queue[asyncio.StreamReader] = asyncio.Queue()
    far_writers = []

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_writers.append(writer)
        accepted.put_nowait(reader)

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    target = BrokerAddress("127.0.0.1", server.sockets[0].getsockname()[1])
    async with FaultProxy(target).running() as proxy:
        both = Ends(proxy, accepted)
        yield both
        both.close()
        for writer in far_writers:
            writer.transport.abort()
        server.close()


@pytest.mark.parametrize(
    ("fault", "arrives"),
    [(LinkFault.REORDER, b"45670123"), (LinkFault.CORRUPT, b"01235567")],
)
async def test_a_fault_that_changes_bytes(ends: Ends, fault: LinkFault, arrives: bytes) -> None:
    writer, reader = await ends.connect()
    begun = ends.proxy.begin(fault)
    writer.write(b"01234567")
    assert await reader.readexactly(8) == arrives
    ends.proxy.end(begun)
    writer.write(b"01234567")
    assert await reader.readexactly(8) == b"01234567"


async def test_what_is_truncated_ends_in_its_middle(ends: Ends) -> None:
    writer, reader = await ends.connect()
    ends.proxy.begin(LinkFault.TRUNCATE)
    writer.write(b"01234567")
    assert await reader.read() == b"0123"


async def test_what_is_delayed_arrives_when_the_fault_ends(ends: Ends) -> None:
    writer, reader = await ends.connect()
    other, read_by_other = await ends.connect()
    begun = ends.proxy.begin(LinkFault.DELAY, which=0)
    writer.write(b"first")
    other.write(b"second")
    assert await read_by_other.readexactly(6) == b"second"
    ends.proxy.end(begun)
    assert await reader.readexactly(5) == b"first"


async def test_what_a_black_hole_took_is_lost_and_the_connection_with_it(ends: Ends) -> None:
    writer, reader = await ends.connect()
    begun = ends.proxy.begin(LinkFault.BLACK_HOLE, which=0)
    other, read_by_other = await ends.connect()
    writer.write(b"lost")
    other.write(b"not lost")
    assert await read_by_other.readexactly(8) == b"not lost"
    ends.proxy.end(begun)
    await until_ended(reader)


async def test_what_is_cut_cannot_be_connected_again_before_the_fault_ends(ends: Ends) -> None:
    _, reader = await ends.connect()
    begun = ends.proxy.begin(LinkFault.CUT)
    await until_ended(reader)
    refused = await ends.dial()
    await until_ended(refused)
    ends.proxy.end(begun)
    writer, again = await ends.connect()
    writer.write(b"hello")
    assert await again.readexactly(5) == b"hello"


async def test_of_two_delays_the_longer_one_counts(ends: Ends) -> None:
    writer, reader = await ends.connect()
    other, read_by_other = await ends.connect()
    longer = ends.proxy.begin(LinkFault.DELAY, which=0)
    shorter = ends.proxy.begin(LinkFault.DELAY, which=0)
    writer.write(b"late")
    ends.proxy.end(shorter)
    reading = asyncio.create_task(reader.readexactly(4))
    for _ in range(10):
        other.write(b"prompt")
        assert await read_by_other.readexactly(6) == b"prompt"
    assert not reading.done()
    ends.proxy.end(longer)
    assert await reading == b"late"
