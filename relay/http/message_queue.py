"""The messages of one WebSocket that wait for its application, which alone reads them.

Has those of ``asyncio.Queue``'s methods that uvicorn uses. What several readers would need takes three
kibibytes more of every connection, and as much time again for every message. Must not read messages.
"""

import asyncio

from uvicorn._types import ASGIReceiveEvent


class MessageQueue:
    """The messages of one connection, oldest first."""

    __slots__ = ("_messages", "_reader")

    def __init__(self) -> None:
        # Not a deque, which has space for 64 from the start: there is hardly ever more than one.
        self._messages: list[ASGIReceiveEvent] = []
        self._reader: asyncio.Future[None] | None = None

    def empty(self) -> bool:
        """Return whether nothing waits."""
        return not self._messages

    def put_nowait(self, item: ASGIReceiveEvent) -> None:
        """Add a message, and wake the reader."""
        self._messages.append(item)
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    async def get(self) -> ASGIReceiveEvent:
        """Return the oldest message, and wait for one if there is none."""
        while not self._messages:
            self._reader = asyncio.get_running_loop().create_future()
            try:
                await self._reader
            finally:
                self._reader = None
        return self._messages.pop(0)
