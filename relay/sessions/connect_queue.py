"""Lets a few steps of handshakes run in each turn of the event loop, so that calls have their turn between.

A turn handles all that is ready. When thousands of nodes reconnect, one long turn makes hundreds ready at
once and the next turn longer still, while calls wait and the ledgers of revocations are not read. Must not
wait for a peer: one that does not answer would hold up the others.
"""

import asyncio
from collections import deque
from collections.abc import Callable

from relay.sessions.connect_limiter import RATE_PER_S, ConnectLimiter

STEPS_PER_TURN = 8
"""About 10 ms."""
MOST_WAITING = int(RATE_PER_S)
"""The handshakes of a second: nodes give up after ten, and what was done for them is lost."""


class ConnectQueue:
    """The handshakes that ``limiter`` admits, first come, first served. ``monotonic`` is in seconds.

    With ``most_waiting`` the relay is slower than the rate, and more are sent away as though over it.
    """

    def __init__(
        self,
        limiter: ConnectLimiter,
        monotonic: Callable[[], float],
        steps_per_turn: int = STEPS_PER_TURN,
        most_waiting: int = MOST_WAITING,
    ) -> None:
        self._limiter = limiter
        self._monotonic = monotonic
        self._steps_per_turn = steps_per_turn
        self._most_waiting = most_waiting
        self._begun: deque[asyncio.Future[None]] = deque()
        self._new: deque[asyncio.Future[None]] = deque()

    async def enter(self, address: str) -> float:
        """Return 0 when a handshake may begin; or, at once, in how many seconds the node is to retry."""
        is_full = len(self._new) >= self._most_waiting
        wait_s = self._limiter.enter(self._monotonic(), address, is_full=is_full)
        if wait_s == 0:
            await self._turn(self._new)
        return wait_s

    async def go_on(self) -> None:
        """Return when a handshake that has begun may go on: these come before new ones."""
        await self._turn(self._begun)

    async def _turn(self, queue: deque[asyncio.Future[None]]) -> None:
        loop = asyncio.get_running_loop()
        if not self._begun and not self._new:
            loop.call_soon(self._next_steps)
        turn: asyncio.Future[None] = loop.create_future()
        queue.append(turn)
        await turn

    def _next_steps(self) -> None:
        steps = 0
        while steps < self._steps_per_turn and (queue := self._begun or self._new):
            turn = queue.popleft()
            if not turn.done():  # else its connection was ended meanwhile
                turn.set_result(None)
                steps += 1
        if self._begun or self._new:
            asyncio.get_running_loop().call_soon(self._next_steps)
