"""Work after each change of certificates or roots: the broker's files, the relay's own TLS.

It reads and signs much, and a disk may be full: nothing waits for it, and it is retried until it succeeds.
Must not know what has changed.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress

from schemas.backoff import Backoff
from schemas.health import Loop

RETRY_S = 2.0
LONGEST_RETRY_S = 60.0
_ROUND_S = 300.0
"""How long they may take together: the access lists of ten thousand nodes, on a slow disk."""

Follow = Callable[[], Awaitable[bool]]
"""Applies the current state; returns whether it succeeded. Raises nothing."""


class FollowUps:
    """Runs ``follows`` after each change; all are pending at the start.

    ``on_bug`` is called with what one of them raises: that must not end the relay, and is retried.

    Attributes:
        loop: the progress of ``run``.
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
        self._pending = list(follows)
        self._changed = asyncio.Event()
        self.loop = Loop()

    def due(self) -> None:
        """Make all pending: something has changed."""
        self._pending = list(self._follows)
        self._changed.set()

    async def run(self) -> None:
        """Run them until cancelled: now, after each change, and with backoff while one fails."""
        backoff = Backoff(self._retry_s, LONGEST_RETRY_S)
        while True:
            self._changed.clear()
            self.loop.busy(_ROUND_S)
            retry_s = None if await self.follow() else backoff.next_s()
            if retry_s is None:
                self.loop.waits()
            else:
                self.loop.busy(retry_s + _ROUND_S)
            with suppress(TimeoutError):
                async with asyncio.timeout(retry_s):
                    await self._changed.wait()
                backoff.reset()

    async def follow(self) -> bool:
        """Run those that are pending; return whether none is any more."""
        pending, self._pending = self._pending, []
        failed = [follow for follow in pending if not await self._done(follow)]
        # A change in the meantime has made all of them pending again.
        self._pending = self._pending or failed
        return not self._pending

    async def _done(self, follow: Follow) -> bool:
        try:
            return await follow()
        except Exception as error:  # noqa: BLE001 - see on_bug
            self._on_bug(error)
            return False
