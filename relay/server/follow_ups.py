"""What must follow each change of who holds a leaf, in its own time: the broker's files, the relay's own TLS.

They read and sign what may be large, and a disk may be full: nothing waits for them, and what has failed is
tried again until it is done. Must not know what has changed.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence

RETRY_S = 2.0
LONGEST_RETRY_S = 60.0

Follow = Callable[[], Awaitable[bool]]
"""Does what is to be done after a change, by what is true now; tells whether it is done. Raises nothing."""


class FollowUps:
    """Those who follow. They are behind until they have followed once.

    ``on_bug`` is told what one of them raised against its promise: it must not end the relay, and is tried
    again.
    """

    def __init__(
        self,
        follows: Sequence[Follow] = (),
        retry_s: float = RETRY_S,
        on_bug: Callable[[Exception], None] = lambda _: None,
    ) -> None:
        self._follows = follows
        self._retry_s = retry_s
        self._on_bug = on_bug
        self._behind = list(follows)
        self._changed = asyncio.Event()

    def due(self) -> None:
        """Say that something has changed."""
        self._behind = list(self._follows)
        self._changed.set()

    async def run(self) -> None:
        """Let them follow until cancelled: now, after each change, and ever more seldom while one fails."""
        retry_s = self._retry_s
        while True:
            self._changed.clear()
            done = await self.follow()
            try:
                async with asyncio.timeout(None if done else retry_s):
                    await self._changed.wait()
                retry_s = self._retry_s
            except TimeoutError:
                retry_s = min(2 * retry_s, LONGEST_RETRY_S)

    async def follow(self) -> bool:
        """Let those follow that are behind; tell whether none is any more."""
        behind, self._behind = self._behind, []
        failed = [follow for follow in behind if not await self._done(follow)]
        # What has changed meanwhile makes all of them behind once more.
        self._behind = self._behind or failed
        return not self._behind

    async def _done(self, follow: Follow) -> bool:
        try:
            return await follow()
        except Exception as error:  # noqa: BLE001 - see on_bug
            self._on_bug(error)
            return False
