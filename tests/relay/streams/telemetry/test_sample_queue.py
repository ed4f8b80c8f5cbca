import asyncio

import pytest

from relay.streams.telemetry.sample_queue import SampleQueue
from relay.streams.telemetry.stream import Sample
from schemas.errors import Failure, ToolError


def sample(number: int) -> Sample:
    return Sample(number, number, "{}")


async def test_samples_are_read_in_order_and_waited_for() -> None:
    queue = SampleQueue()
    reader = asyncio.create_task(queue.get())
    await asyncio.sleep(0)
    for number in (1, 2):
        queue.put(sample(number))
    assert [await reader, await queue.get()] == [sample(1), sample(2)]


async def test_a_reader_that_is_slow_loses_the_oldest_and_their_number_is_known() -> None:
    queue = SampleQueue(max_waiting=3)
    for number in range(10):
        queue.put(sample(number))
    assert [(await queue.get()).number for _ in range(3)] == [7, 8, 9]
    assert queue.lost == 7


async def test_what_waits_is_read_before_the_end() -> None:
    queue = SampleQueue()
    queue.put(sample(1))
    queue.end(ToolError(Failure.NODE_OFFLINE))
    assert await queue.get() == sample(1)
    with pytest.raises(ToolError, match="E_NODE_OFFLINE"):
        await queue.get()


async def test_the_end_wakes_a_reader() -> None:
    queue = SampleQueue()
    reader = asyncio.create_task(queue.get())
    await asyncio.sleep(0)
    queue.end(ToolError(Failure.SAFETY_DENIED))
    with pytest.raises(ToolError, match="E_SAFETY_DENIED"):
        await asyncio.wait_for(reader, 10)
