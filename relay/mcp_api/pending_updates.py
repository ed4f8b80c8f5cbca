"""What one client is still to be notified of: each thing once, however often it changes meanwhile.

So a client that does not read loses nothing but repetitions, and what waits for it is bounded. Must not send.
"""

import asyncio
from collections.abc import Hashable
from typing import Generic, TypeVar

UpdateT = TypeVar("UpdateT", bound=Hashable)


class PendingUpdates(Generic[UpdateT]):
    """The updates for one client, in the order of their first change since they were last sent."""

    def __init__(self) -> None:
        self._pending: dict[UpdateT, None] = {}
        self._changed = asyncio.Event()
        self._closed = False

    def add(self, update: UpdateT) -> None:
        """Add an update, unless it waits already."""
        self._pending[update] = None
        self._changed.set()

    def close(self) -> None:
        """Let ``next`` return None once nothing waits."""
        self._closed = True
        self._changed.set()

    async def next(self) -> UpdateT | None:
        """Remove the first update and return it, and wait for one; None after the last."""
        while not self._pending:
            if self._closed:
                return None
            self._changed.clear()
            await self._changed.wait()
        update = next(iter(self._pending))
        del self._pending[update]
        return update
