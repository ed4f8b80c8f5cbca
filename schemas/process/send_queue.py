"""What waits to be sent on one connection: in order, within a bound, by one task while there is something.

Must not know what it sends, nor what is done with what is refused.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

ItemT = TypeVar("ItemT")


class SendQueue(Generic[ItemT]):
    """The items that wait, while fewer than ``most_bytes`` do: the one that exceeds it is the last.

    ``send`` returns once the peer has taken the item, or False if the connection is lost: what waits is then
    dropped.
    """

    __slots__ = ("_bytes", "_items", "_most_bytes", "_send", "_sending")

    def __init__(self, send: Callable[[ItemT], Awaitable[bool]], most_bytes: int) -> None:
        self._send = send
        self._most_bytes = most_bytes
        # Not a deque, which has space for 64 from the start: most connections are sent none.
        self._items: list[tuple[ItemT, int]] = []
        self._bytes = 0
        self._sending: asyncio.Task[None] | None = None

    @property
    def is_full(self) -> bool:
        """Whether nothing may be put now."""
        return self._bytes >= self._most_bytes

    def put(self, item: ItemT, size: int) -> None:
        """Send ``item``, which takes ``size`` bytes, behind what waits."""
        self._items.append((item, size))
        self._bytes += size
        if self._sending is None:
            self._sending = asyncio.create_task(self._run())

    def close(self) -> None:
        """Drop what waits: the connection is lost."""
        self._clear()
        if self._sending is not None:
            self._sending.cancel()

    async def _run(self) -> None:
        try:
            while self._items:
                item, size = self._items[0]
                if not await self._send(item):
                    self._clear()
                    return
                del self._items[0]
                self._bytes -= size
        finally:
            self._sending = None

    def _clear(self) -> None:
        self._items.clear()
        self._bytes = 0
