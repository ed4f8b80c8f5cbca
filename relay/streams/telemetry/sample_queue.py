"""The samples for one open call: the few that wait, and the notifications that send them.

A slow reader loses the oldest. Must not know streams.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any

from attrs import define, field

from relay.calls.call_record import Following
from relay.streams.telemetry.stream import Sample
from schemas.errors import ToolError
from schemas.projection import META_LOST

MAX_WAITING = 16


@define(eq=False, repr=False)
class SampleQueue:
    """The samples for one reader.

    Attributes:
        lost: how many it has lost since the start.
    """

    _max_waiting: int = MAX_WAITING
    _waiting: deque[Sample] = field(init=False, factory=deque)
    _changed: asyncio.Event = field(init=False, factory=asyncio.Event)
    _error: ToolError | None = field(init=False, default=None)
    lost: int = field(init=False, default=0)

    def put(self, sample: Sample) -> None:
        """Add a sample; if there are too many, the oldest is lost."""
        if len(self._waiting) == self._max_waiting:
            self._waiting.popleft()
            self.lost += 1
        self._waiting.append(sample)
        self._changed.set()

    def end(self, error: ToolError) -> None:
        """End: the reader gets what waits, and then ``error``."""
        self._error = error
        self._changed.set()

    async def get(self) -> Sample:
        """Return the oldest sample, and wait for one if there is none.

        Raises:
            ToolError: it has ended.
        """
        while not self._waiting:
            if self._error is not None:
                raise self._error
            self._changed.clear()
            await self._changed.wait()
        return self._waiting.popleft()


async def send_samples(
    following: Following,
    first: str,
    queue: SampleQueue,
    shown: Callable[[Sample], str],
    lost: Callable[[int], None],
) -> None:
    """Send ``first`` and then each sample of ``queue``, as ``shown`` returns it, as many as are followed.

    ``progress`` counts the samples, also those that the reader has lost: a gap in it shows how many. ``lost``
    is called with their number.

    Raises:
        ToolError: the queue has ended.
        StreamClosedError: the client has disconnected.
    """
    progress, missed, text = 1, 0, first
    while True:
        params: dict[str, Any] = {
            "progressToken": following.progress_token,
            "progress": progress,
            "message": text,
        }
        if missed:
            lost(missed)
            params["_meta"] = {META_LOST: missed}
        before = queue.lost
        await following.emit("notifications/progress", params)
        if following.most is not None and progress >= following.most:
            return
        sample = await queue.get()
        missed = queue.lost - before
        progress += 1 + missed
        text = shown(sample)
