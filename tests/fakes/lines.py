"""A log that tests can read, and wait for."""

import asyncio
import io
import json
from typing import Any

BOUND_S = 30


class LogLines(io.StringIO):
    """The stream of a logger that writes JSON lines."""

    def __init__(self) -> None:
        super().__init__()
        self._written = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None

    def write(self, text: str) -> int:
        """Take in a part of a line, in any thread."""
        count = super().write(text)
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._written.set)
        return count

    def entries(self, event: str | None = None) -> list[dict[str, Any]]:
        """Return every whole line, or those of one event."""
        whole = self.getvalue().rpartition("\n")[0]
        entries = [json.loads(line) for line in whole.splitlines()]
        return [entry for entry in entries if event is None or entry["event"] == event]

    async def until(self, event: str, count: int = 1) -> dict[str, Any]:
        """Wait until ``event`` has been logged ``count`` times, and return the last of them."""
        self._loop = asyncio.get_running_loop()
        async with asyncio.timeout(BOUND_S):
            while len(found := self.entries(event)) < count:
                self._written.clear()
                await self._written.wait()
        return found[-1]


class Terminal(io.StringIO):
    """A stream that a person looks at."""

    def isatty(self) -> bool:
        return True
