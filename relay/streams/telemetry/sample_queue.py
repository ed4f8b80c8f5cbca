"""The samples that wait for one open call: a few, of which a slow reader loses the oldest.

Must not know what a reader does with them.
"""

import asyncio
from collections import deque

from relay.streams.telemetry.history import Sample
from schemas.errors import ToolError

MAX_WAITING = 16


class SampleQueue:
    """The samples for one reader.

    Attributes:
        lost: how many it has lost since the start.
    """

    def __init__(self, max_waiting: int = MAX_WAITING) -> None:
        self._waiting: deque[Sample] = deque()
        self._max_waiting = max_waiting
        self._changed = asyncio.Event()
        self._error: ToolError | None = None
        self.lost = 0

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
