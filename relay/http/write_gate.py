"""Whether a connection may write: open while its transport takes data.

Has those of ``asyncio.Event``'s methods that uvicorn uses. An event holds a queue of waiters from the start,
which takes most of a kibibyte of every connection, and hardly one ever waits. Must not know what is written.
"""

import asyncio


class WriteGate:
    """Open at first."""

    __slots__ = ("_opened",)

    def __init__(self) -> None:
        self._opened: asyncio.Future[None] | None = None

    def is_set(self) -> bool:
        """Return whether it is open."""
        return self._opened is None

    def set(self) -> None:
        """Open it, and wake those that wait."""
        if self._opened is not None:
            self._opened.set_result(None)
            self._opened = None

    def clear(self) -> None:
        """Close it."""
        if self._opened is None:
            self._opened = asyncio.get_running_loop().create_future()

    async def wait(self) -> bool:
        """Wait until it is open."""
        while self._opened is not None:
            # Shield: a writer that is cancelled must not wake the others.
            await asyncio.shield(self._opened)
        return True
