"""The loop of the live targets: connections break as those of a kernel do, and a wait costs no time."""

import asyncio
import time
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest

from tests.fuzz.memory_loop import MemoryLoop

PLACE = ("127.0.0.1", 1)
Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@pytest.fixture
def loop() -> Iterator[MemoryLoop]:
    made = MemoryLoop()
    yield made
    made.close()


@asynccontextmanager
async def connected(loop: MemoryLoop) -> AsyncIterator[tuple[Streams, Streams]]:
    """Hold both ends of a connection."""
    ends = await asyncio.open_connection(*PLACE), await loop.accept(PLACE)
    yield ends
    for _, writer in ends:
        writer.transport.abort()


def test_what_is_written_arrives_and_an_end_that_is_closed_ends_the_other(loop: MemoryLoop) -> None:
    async def work() -> None:
        async with connected(loop) as ((reader, writer), (far_reader, far_writer)):
            writer.write(b"one")
            writer.write(b"two")
            assert await far_reader.readexactly(6) == b"onetwo"
            far_writer.write(b"last")
            far_writer.close()
            assert await reader.read() == b"last"
            await writer.drain()
            await far_writer.wait_closed()

    loop.run_until_complete(work())


def test_an_end_that_is_closed_with_data_unread_resets_the_connection(loop: MemoryLoop) -> None:
    async def work() -> None:
        async with connected(loop) as ((reader, writer), (_, far_writer)):
            far_writer.transport.pause_reading()  # type: ignore[attr-defined]  # a transport that reads as well
            writer.write(b"unread")
            await asyncio.sleep(0)
            far_writer.transport.abort()
            with pytest.raises(ConnectionResetError):
                await reader.read()

    loop.run_until_complete(work())


def test_one_that_writes_to_an_end_that_does_not_read_waits_and_goes_on_when_it_does(
    loop: MemoryLoop,
) -> None:
    async def work() -> None:
        async with connected(loop) as ((_, writer), (far_reader, far_writer)):
            far_writer.transport.pause_reading()  # type: ignore[attr-defined]  # as above
            writer.write(bytes(1 << 20))
            draining = asyncio.create_task(writer.drain())
            await asyncio.sleep(1)
            assert not draining.done()
            far_writer.transport.resume_reading()  # type: ignore[attr-defined]  # as above
            await draining
            assert len(await far_reader.readexactly(1 << 20)) == 1 << 20

    loop.run_until_complete(work())


def test_an_hour_passes_at_once_and_in_the_order_of_its_timers(loop: MemoryLoop) -> None:
    passed: list[int] = []

    async def work() -> None:
        for hours in (3, 1, 2):
            loop.call_later(3600 * hours, passed.append, hours)
        await asyncio.sleep(4 * 3600)

    begun = time.monotonic()
    loop.run_until_complete(work())
    assert passed == [1, 2, 3]
    # Not a measurement: it would be four hours.
    assert time.monotonic() - begun < 3600


def test_what_is_handed_to_a_thread_is_done_or_fails_at_once(loop: MemoryLoop) -> None:
    async def work() -> None:
        assert await asyncio.to_thread(int, "7") == 7
        with pytest.raises(ValueError, match="seven"):
            await asyncio.to_thread(int, "seven")

    loop.run_until_complete(work())


def test_a_wait_for_what_cannot_happen_fails(loop: MemoryLoop) -> None:
    async def work() -> None:
        await asyncio.Event().wait()

    waiting: Coroutine[Any, Any, None] = work()
    with pytest.raises(AssertionError, match="can never happen"):
        loop.run_until_complete(waiting)
    for task in asyncio.all_tasks(loop):
        task.cancel()
        with suppress(asyncio.CancelledError):
            loop.run_until_complete(task)
