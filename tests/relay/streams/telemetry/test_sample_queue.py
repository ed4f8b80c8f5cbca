import asyncio
from collections.abc import Mapping
from typing import Any

import pytest

from relay.calls.call_record import Following
from relay.streams.telemetry.sample_queue import SampleQueue, send_samples
from relay.streams.telemetry.stream import Sample
from schemas.errors import Failure, ToolError
from schemas.projection import META_LOST


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


@pytest.mark.parametrize("token", ["token-1", 7])
async def test_progress_counts_the_samples_and_those_that_were_lost(token: str | int) -> None:
    queue, sent, lost = SampleQueue(max_waiting=2), list[Mapping[str, Any]](), list[int]()

    async def emit(method: str, params: Mapping[str, Any]) -> None:
        assert method == "notifications/progress"
        sent.append(params)
        await asyncio.sleep(0)

    sending = asyncio.create_task(
        send_samples(
            Following(emit, token), "first", queue, lambda sample: f"shown {sample.text}", lost.append
        )
    )
    await asyncio.sleep(0)
    for number in range(5):
        queue.put(Sample(number, number, str(number)))
    queue.end(ToolError(Failure.SAFETY_DENIED))
    with pytest.raises(ToolError, match="E_SAFETY_DENIED"):
        await sending
    assert sent == [
        {"progressToken": token, "progress": 1, "message": "first"},
        {"progressToken": token, "progress": 5, "message": "shown 3", "_meta": {META_LOST: 3}},
        {"progressToken": token, "progress": 6, "message": "shown 4"},
    ]
    assert lost == [3]
