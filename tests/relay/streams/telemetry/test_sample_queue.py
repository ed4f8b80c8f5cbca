import asyncio
from collections.abc import Mapping
from typing import Any

import pytest

from relay.calls.call_record import Following
from relay.streams.telemetry.sample_queue import SampleQueue, send_samples
from relay.streams.telemetry.stream import Sample
from schemas.errors import Failure, ToolError
from schemas.projection import META_LOST


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
